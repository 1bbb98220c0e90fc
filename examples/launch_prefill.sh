#!/usr/bin/env bash
# Starts a vLLM prefill node with kvweave's connector; --help lists the environment variables.
set -euo pipefail
ROLE=kv_producer
ROLE_TEXT=prefill
DEFAULT_PORT=8100
DEFAULT_KV_PORT=14579
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
launch "$@"
