# Shared part of launch_prefill.sh and launch_decode.sh; sourced, not run.
# The caller sets ROLE (kv_producer or kv_consumer), ROLE_TEXT, DEFAULT_PORT and DEFAULT_KV_PORT, then calls
# `launch "$@"`. Every knob is an environment variable; nothing is read from anywhere else.

usage() {
    cat <<TEXT
Usage: [VARIABLE=value ...] $(basename "$0") [--help]

Starts a vLLM ${ROLE_TEXT} node with kvweave's connector. Stop it with SIGTERM or Ctrl-C.

  MODEL            model folder or name                             (required)
  SERVED_NAME      name in the API                                  [MODEL]
  HOST, PORT       address of the OpenAI API                        [127.0.0.1, ${DEFAULT_PORT}]
  PYTHON           interpreter                                      [the repository's .venv, else python3]
  DEVICE           cpu or cuda                                      [cuda if nvidia-smi lists a GPU, else cpu]

Layout (the two sides may differ in all of it):
  TP               tensor-parallel size                             [1]
  PCP              prefill-context-parallel size                    [1]
  DCP              decode-context-parallel size                     [1]
  PP               pipeline-parallel size                           [1]
  BLOCK_SIZE       tokens in one block of one rank                  [16]
  INTERLEAVE       consecutive tokens per context-parallel rank     [BLOCK_SIZE]

Model and memory:
  DTYPE            weights and KV cache                             [auto]
  MAX_MODEL_LEN    longest sequence, tokens                         [the model's]
  KV_CACHE_GB      KV cache per rank, whole GiB                     [cpu: 1; cuda: what is free]
  EAGER            1: no compilation or CUDA graphs                 [cpu: 1; cuda: 0]

KV transfer (KV_HOST, KV_PORT and LEASE_S count on a prefill node only):
  KV_HOST          address the other side reaches this node under   [127.0.0.1]
  KV_PORT          port of the control channel                      [${DEFAULT_KV_PORT}]
  TRANSPORT        how bytes move                                   [nixl]
  LEASE_S          seconds a finished prefill is kept unclaimed     [the connector's default]
  FAILURE_POLICY   recompute or fail, when KV cannot be loaded      [recompute]
  EXTRA_CONFIG     JSON object, further keys of the connector       [{}]

  EXTRA_ARGS       further vLLM arguments, split at blanks          []
TEXT
}

# One line of JSON for --kv-transfer-config.
transfer_config() {
    "$PYTHON" - "$ROLE" "$FAILURE_POLICY" "$KV_HOST" "$KV_PORT" "$TRANSPORT" "$LEASE_S" "$EXTRA_CONFIG" <<'PYTHON_END'
import json, sys

role, policy, host, port, transport, lease_s, extra = sys.argv[1:]
try:
    config = {"host": host, "port": int(port), "transport": transport}
    if lease_s:
        config["lease_s"] = float(lease_s)
    config.update(json.loads(extra))
except (TypeError, ValueError) as error:
    sys.exit(f"error: KV_PORT, LEASE_S or EXTRA_CONFIG: {error}; got {port!r}, {lease_s!r}, {extra!r}")
print(json.dumps({
    "kv_connector": "WeaveConnector",
    "kv_role": role,
    "kv_load_failure_policy": policy,
    "kv_connector_extra_config": config,
}))
PYTHON_END
}

default_device() {
    if nvidia-smi --list-gpus 2>/dev/null | grep -q .; then echo cuda; else echo cpu; fi
}

default_python() {
    local own
    own="$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python"
    if [[ -x "$own" ]]; then echo "$own"; else command -v python3; fi
}

launch() {
    if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
        usage
        exit 0
    elif (($# > 0)); then
        echo "error: unexpected argument '$1'; every knob is an environment variable, see --help" >&2
        exit 2
    elif [[ -z "${MODEL:-}" ]]; then
        echo "error: MODEL is not set; see --help" >&2
        exit 2
    fi
    : "${PYTHON:=$(default_python)}" "${DEVICE:=$(default_device)}"
    command -v "$PYTHON" >/dev/null || {
        echo "error: PYTHON is '$PYTHON'; no such interpreter: run 'make setup', or set it" >&2
        exit 2
    }
    : "${HOST:=127.0.0.1}" "${PORT:=$DEFAULT_PORT}" "${SERVED_NAME:=$MODEL}"
    : "${TP:=1}" "${PCP:=1}" "${DCP:=1}" "${PP:=1}" "${BLOCK_SIZE:=16}" "${INTERLEAVE:=$BLOCK_SIZE}"
    : "${DTYPE:=auto}" "${MAX_MODEL_LEN:=}" "${KV_CACHE_GB:=}" "${EAGER:=}"
    : "${KV_HOST:=127.0.0.1}" "${KV_PORT:=$DEFAULT_KV_PORT}" "${TRANSPORT:=nixl}" "${LEASE_S:=}"
    : "${FAILURE_POLICY:=recompute}" "${EXTRA_CONFIG:="{}"}" "${EXTRA_ARGS:=}"

    local arguments=(
        --host "$HOST" --port "$PORT" --model "$MODEL" --served-model-name "$SERVED_NAME"
        --tensor-parallel-size "$TP" --pipeline-parallel-size "$PP"
        --prefill-context-parallel-size "$PCP" --decode-context-parallel-size "$DCP"
        --block-size "$BLOCK_SIZE" --cp-kv-cache-interleave-size "$INTERLEAVE"
        --dtype "$DTYPE"
    )
    case "$DEVICE" in
        cpu)
            # No core pinning: several nodes on one host would all pin the same cores.
            export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
            export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
            export VLLM_CPU_KVCACHE_SPACE="${KV_CACHE_GB:-1}"
            EAGER="${EAGER:-1}"
            ;;
        cuda)
            if [[ -n "$KV_CACHE_GB" ]]; then
                [[ "$KV_CACHE_GB" =~ ^[0-9]+$ ]] || {
                    echo "error: KV_CACHE_GB is '$KV_CACHE_GB'; allowed: whole GiB" >&2
                    exit 2
                }
                arguments+=(--kv-cache-memory-bytes "$((KV_CACHE_GB * 1024 ** 3))")
            fi
            ;;
        *)
            echo "error: DEVICE is '$DEVICE'; allowed: cpu, cuda" >&2
            exit 2
            ;;
    esac
    if [[ "$EAGER" == 1 ]]; then arguments+=(--enforce-eager); fi
    if [[ -n "$MAX_MODEL_LEN" ]]; then arguments+=(--max-model-len "$MAX_MODEL_LEN"); fi
    local config
    config="$(transfer_config)"
    arguments+=(--kv-transfer-config "$config")
    # shellcheck disable=SC2206  # splitting is what EXTRA_ARGS is for
    arguments+=($EXTRA_ARGS)
    exec "$PYTHON" -m vllm.entrypoints.openai.api_server "${arguments[@]}"
}
