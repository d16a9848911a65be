#!/bin/sh
# Redis with its password from a file: neither the arguments, which every user of the machine can read, nor the
# environment hold it. REDIS_MORE: further lines of configuration.
set -eu
password=$(cat "$REDIS_PASSWORD_FILE")
[ -n "$password" ] || { echo "$REDIS_PASSWORD_FILE is empty" >&2; exit 1; }
exec redis-server - <<CONF
$(cat "$(dirname "$0")/redis.conf")
port ${REDIS_PORT:-6379}
dir ${REDIS_DIR:-/data}
maxmemory ${REDIS_MAXMEMORY:-1gb}
requirepass "$password"
masterauth "$password"
${REDIS_MORE:-}
CONF
