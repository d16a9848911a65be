-- WAITING: reservations that count as queued. ARGV[1]: their set. Returns {id, pool, {part, …}}, …
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', org .. ARGV[1])) do
  local packed = redis.call('GET', org .. 'reservation:' .. id)
  if packed then
    local r, parts = cmsgpack.unpack(packed), {}
    for part in pairs(r.parts) do parts[#parts + 1] = part end
    found[#found + 1] = {id, r.pool, parts}
  end
end
return found
