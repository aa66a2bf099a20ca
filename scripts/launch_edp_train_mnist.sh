#!/usr/bin/env bash
# Elastic distributed parallelism (EDP) on this machine, with three workers. Arguments go on to `smolcluster train`.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/smolcluster.sh" train mnist --strategy edp --workers 3 "$@"
