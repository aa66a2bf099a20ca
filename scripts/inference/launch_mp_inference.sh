#!/usr/bin/env bash
# The machines that hold the layers of a model: STAGES processes here (default: 2), which wait for launch_api.sh
# and end with it.
# FRONT: where that is (default: 127.0.0.1:65433). On other machines, with `FRONT=0.0.0.0:65433 launch_api.sh` and a token:
# smolcluster stage --server HOST:65433. Arguments go on to `smolcluster stage`.
set -euo pipefail
here="$(dirname "${BASH_SOURCE[0]}")"
stages=()
trap 'kill "${stages[@]}" 2>/dev/null || true; wait' EXIT INT TERM
for number in $(seq "${STAGES:-2}"); do
  "$here/../smolcluster.sh" stage --server "${FRONT:-127.0.0.1:65433}" --name "stage-$number" "$@" &
  stages+=("$!")
done
wait
