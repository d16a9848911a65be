#!/bin/sh
# One Sentinel, which writes what it learns to its file. Without a password of its own: only those who need it reach it.
#   REDIS_FIRST  host:port of the Redis that is the primary at the very first start
#   SENTINEL_NAME, SENTINEL_PORT   how the others reach this one (26379)    SENTINEL_DIR   where its file is kept (/data)
set -eu
file=${SENTINEL_DIR:-/data}/sentinel.conf
[ -s "$file" ] || cat >"$file" <<CONF
port ${SENTINEL_PORT:-26379}
protected-mode no
dir ${SENTINEL_DIR:-/data}
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $SENTINEL_NAME
sentinel monitor noria ${REDIS_FIRST%:*} ${REDIS_FIRST##*:} 2
sentinel auth-pass noria $(cat "$REDIS_PASSWORD_FILE")
sentinel down-after-milliseconds noria ${SENTINEL_DOWN_AFTER:-5000}
sentinel failover-timeout noria 30000
CONF
exec redis-server "$file" --sentinel
