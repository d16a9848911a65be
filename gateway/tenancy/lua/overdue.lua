-- OVERDUE: reservations that nobody has looked at for long, for whoever asks first: to others they are not due again for
-- ARGV[1] milliseconds. ARGV[2]: how many at most. Returns {id, pool, {part, …}}, …
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', org .. 'reservations', '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local packed = redis.call('GET', org .. 'reservation:' .. id)
  if packed then
    local r, parts = cmsgpack.unpack(packed), {}
    for part in pairs(r.parts) do parts[#parts + 1] = part end
    found[#found + 1] = {id, r.pool, parts}
    redis.call('ZADD', org .. 'reservations', now + ARGV[1], id)
  else
    redis.call('ZREM', org .. 'reservations', id)
  end
end
return found
