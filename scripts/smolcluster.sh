#!/usr/bin/env bash
# The command of this project's environment, or of the path. SMOLCLUSTER names another.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
command="${SMOLCLUSTER:-smolcluster}"
for found in "$root/.venv/bin/smolcluster" "$root/.venv/Scripts/smolcluster.exe"; do
  if [ -z "${SMOLCLUSTER:-}" ] && [ -x "$found" ]; then
    command="$found"
  fi
done
exec "$command" "$@"
