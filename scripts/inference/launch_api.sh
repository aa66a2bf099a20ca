#!/usr/bin/env bash
# The API and the chat page at http://localhost:5050, over the stages of launch_mp_inference.sh. MODEL: default smollm2.
# FRONT: where stages are waited for (default: 127.0.0.1:65433; 0.0.0.0:65433 for other machines, with a token).
# Arguments go on to `smolcluster serve`.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../smolcluster.sh" serve "${MODEL:-smollm2}" \
  --stages "${STAGES:-2}" --workers 0 --listen "${FRONT:-127.0.0.1:65433}" --port 5050 "$@"
