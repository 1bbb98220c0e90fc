#!/usr/bin/env bash
# Starts a vLLM decode node with kvweave's connector; --help lists the environment variables.
set -euo pipefail
ROLE=kv_consumer
ROLE_TEXT=decode
DEFAULT_PORT=8200
DEFAULT_KV_PORT=14580
source "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"
launch "$@"
