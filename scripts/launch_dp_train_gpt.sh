#!/usr/bin/env bash
# Classic data parallelism (ClassicDP) on this machine, with three workers. Arguments go on to `smolcluster train`.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/smolcluster.sh" train gpt --strategy allreduce --workers 3 "$@"
