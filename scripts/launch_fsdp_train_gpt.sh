#!/usr/bin/env bash
# Sharded data parallelism (FSDP) on this machine, with three workers. Arguments go on to `smolcluster train`.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/smolcluster.sh" train gpt --strategy fsdp --workers 3 "$@"
