#!/bin/sh
# One of several Redis under Sentinels: as the primary that they name, else as its replica. Where no Sentinel answers
# yet, the first one is the primary.
#   REDIS_NAME       how the others reach this one     REDIS_PORT   at which port (6379)
#   REDIS_FIRST      host:port of the first one        SENTINELS    host:port of each Sentinel, with blanks between
set -eu
me=$REDIS_NAME:${REDIS_PORT:-6379}
primary=
for sentinel in $SENTINELS; do
  # Two lines: host, port. A Sentinel that is not there says nothing.
  said=$(timeout 2 redis-cli -h "${sentinel%:*}" -p "${sentinel##*:}" sentinel get-master-addr-by-name noria 2>/dev/null) || continue
  primary=$(printf %s "$said" | tr '\n' ':')
  [ -z "$primary" ] || break
done
primary=${primary:-$REDIS_FIRST}
REDIS_MORE="replica-announce-ip $REDIS_NAME"
[ "$primary" = "$me" ] || REDIS_MORE="$REDIS_MORE
replicaof ${primary%:*} ${primary##*:}"
export REDIS_MORE
echo "$me: the primary is $primary"
exec /bin/sh "$(dirname "$0")/start.sh"
