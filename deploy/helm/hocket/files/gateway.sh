#!/usr/bin/env bash
# The gateway pod's container: a Ray node and, beside it, `hocket up`, which starts the gateway here
# and the workers on the nodes of their pools.
#
# When either ends, so does the container, and Kubernetes starts both again; a changed
# configuration ends it too. SIGTERM drains.
set -uo pipefail

config="$(dirname "$0")/hocket.toml"
settings=()
if [[ -n "${HOCKET_REDIS_URL:-}" ]]; then
  settings+=(--set "redis.url=${HOCKET_REDIS_URL}")
fi

is_running() {
  kill -0 "$1" 2>/dev/null
}

ulimit -n "${RAY_START_ULIMIT_OPEN_FILES:-65536}" || echo "the limit of open files stays $(ulimit -n)"
# KubeRay's command quotes some of its arguments.
eval "exec ${KUBERAY_GEN_RAY_START_CMD}" &
ray=$!
before=$(sha256sum "$config")
# It waits for the Ray node beside it.
hocket up --config "$config" ${settings[@]+"${settings[@]}"} &
up=$!
trap 'kill -TERM "$up" 2>/dev/null' TERM INT

while is_running "$ray" && is_running "$up"; do
  if [[ "$(sha256sum "$config")" != "$before" ]]; then
    echo "the configuration has changed: starting again with it"
    break
  fi
  sleep 2 &
  wait $!
done
is_running "$ray" || echo "the Ray node has ended"
kill -TERM "$up" 2>/dev/null
wait "$up"
status=$?
kill -TERM "$ray" 2>/dev/null
wait "$ray"
exit "$status"
