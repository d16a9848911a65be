#!/bin/sh
# Makes a cluster of servers that are empty; does nothing where it is made.
#   REDIS_NODES     host:port of each, with blanks between     REDIS_REPLICAS   replicas of each primary (1)
set -eu
REDISCLI_AUTH=$(cat "$REDIS_PASSWORD_FILE")
export REDISCLI_AUTH
addresses= known=
for node in $REDIS_NODES; do
  host=${node%:*} port=${node##*:}
  until redis-cli -h "$host" -p "$port" ping 2>/dev/null | grep -q PONG; do echo "waiting for $node"; sleep 1; done
  # Members know each other by address, and follow one whose address changes.
  addresses="$addresses $(getent hosts "$host" | cut -d' ' -f1 | head -n1):$port"
  known="$known $(redis-cli -h "$host" -p "$port" cluster info | tr -d '\r' | sed -n 's/^cluster_known_nodes://p')"
done
for count in $known; do
  [ "$count" = 1 ] || { echo "the cluster is made"; exit 0; }
done
# shellcheck disable=SC2086  # a list
exec redis-cli --cluster create $addresses --cluster-replicas "${REDIS_REPLICAS:-1}" --cluster-yes
