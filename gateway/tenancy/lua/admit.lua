-- ADMIT: reserves all that a request may use on every limit and budget that holds for it, or nothing. Idempotent by id.
-- ARGV[1]: id, version of the directory that the limits are from, milliseconds after which somebody looks whether the
-- request was taken up, pool, parts {{id, input, output}}, meters {{subject, field, kind, limit, period}}, gates {{set,
-- limit}}, budgets {{period, field, unit, limit}}, prices {input, output}; in msgpack.
-- Returns {'stale'}, or {what, which, milliseconds to wait, output tokens granted to each part (-1: as asked), remaining
-- and milliseconds to the full limit of each meter …}. `what` is 'in', or who refuses: 'meter', 'large' (more than the
-- whole limit), 'gate', 'spent' (a budget), 'held' (a budget, by others that run); `which` is its place from 1.
local id, version, hold, model, parts, meters, gates, budgets, prices = unpack(cmsgpack.unpack(ARGV[1]))
if redis.call('HGET', org .. 'directory', 'version') ~= version then return {'stale'} end
local key = org .. 'reservation:' .. id
local again = redis.call('EXISTS', key) == 1

local input, output, granted = 0, 0, -1
for _, part in ipairs(parts) do input, output = input + part[2], output + part[3] end

local what, which, wait = 'in', 0, 0

-- Budgets first: what they leave may shorten the output, and the meters are charged with that.
local function can_pay(left, unit, least)
  local fixed, each = worth(unit, prices, input, 0), worth(unit, prices, 0, 1)
  if left < fixed then return -1 end
  return each > 0 and math.floor((left - fixed) / each) or math.huge
end

local least, payable = output > 0 and #parts or 0, math.huge
for i, b in ipairs(again and {} or budgets) do
  local f = redis.call('HMGET', org .. 'spent:' .. b[1], b[2], b[2] .. ':held')
  local left = b[4] - tonumber(f[1] or 0)
  local can = can_pay(left - tonumber(f[2] or 0), b[3], least)
  if can < least or left <= 0 then
    what, which = (can_pay(left, b[3], least) < least or left <= 0) and 'spent' or 'held', i
    break
  end
  payable = math.min(payable, can)
end
if what == 'in' and payable < output then
  granted, output = math.floor(payable / #parts), 0
  for _, part in ipairs(parts) do
    part[3] = math.min(part[3], granted)
    output = output + part[3]
  end
end

local states, fetched = {}, {}
for i, m in ipairs(meters) do
  local subject, field, kind, limit, period = unpack(m)
  local used, held = read_meter(redis.call('HGET', org .. 'meters:' .. subject, field), limit, period)
  local cost = kind == 'r' and 1 or amount(kind, input, output)
  states[i] = {used, held, cost}
  local over = used + held + cost - limit
  if not again and over > 1e-6 and what ~= 'spent' and what ~= 'held' then
    local needs = over * period / limit
    if cost > limit and what ~= 'large' then
      what, which, wait = 'large', i, 0
    elseif what ~= 'large' and (what == 'in' or needs > wait) then
      what, which, wait = 'meter', i, needs
    end
  end
end
for i, gate in ipairs(again and {} or gates) do
  if what == 'in' and redis.call('SCARD', org .. gate[1]) >= gate[2] then what, which = 'gate', i end
end

local taken = what == 'in' and not again
if taken then
  local reservation = {meters = meters, gates = {}, budgets = {}, prices = prices, pool = model, parts = {}}
  for _, part in ipairs(parts) do reservation.parts[part[1]] = {part[2], part[3]} end
  for i, m in ipairs(meters) do
    local used, held, cost = unpack(states[i])
    if m[3] == 'r' then used = used + cost else held = held + cost end
    write_meter(m[1], m[2], used, held)
    states[i][1], states[i][2] = used, held
  end
  for i, gate in ipairs(gates) do
    redis.call('SADD', org .. gate[1], id)
    redis.call('PEXPIRE', org .. gate[1], 2 * DAY)
    reservation.gates[i] = gate[1]
  end
  for i, b in ipairs(budgets) do
    redis.call('HINCRBY', org .. 'spent:' .. b[1], b[2] .. ':held', worth(b[3], prices, input, output))
    reservation.budgets[i] = {b[1], b[2], b[3]}
  end
  redis.call('SET', key, cmsgpack.pack(reservation))
  redis.call('ZADD', org .. 'reservations', now + hold, id)
end

local reply = {what, which, math.ceil(wait), granted}
for i, m in ipairs(meters) do
  local used, held = states[i][1], states[i][2]
  reply[#reply + 1] = math.max(0, math.floor(m[4] - used - held + 1e-6))
  reply[#reply + 1] = math.ceil((used + held) * m[5] / m[4])
end
return reply
