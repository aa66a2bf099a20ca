#!/usr/bin/env bash
# The synchronous parameter server (SyncPS) on this machine, with three workers. Arguments go on to `smolcluster train`.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/smolcluster.sh" train gpt --strategy syncps --workers 3 "$@"
