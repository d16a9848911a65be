-- First lines of every script on an organisation's books. KEYS[1] is its prefix `noria:{organisation}:`, which names the
-- cluster slot; every key is made from it. Times are milliseconds on the server's clock, with fractions.
--
-- A meter is GCRA as a leaky bucket (ITU-T I.371 has both forms and shows that they are one): `used` drains at
-- limit / period from the moment `at`. `held` is what running requests have reserved of it; that drains not at all, and
-- becomes what was really used at their end. used + held never exceeds the limit.
local org = KEYS[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + tonumber(clock[2]) / 1000
local DAY = 86400000

local function exact(number) return string.format('%.17g', number) end

local function read_meter(value, limit, period)
  if not value then return 0, 0 end
  local used, at, held = string.match(value, '^(%S+) (%S+) (%S+)$')
  return math.max(0, used - math.max(0, now - at) * limit / period), tonumber(held)
end

local function write_meter(subject, field, used, held)
  local meters = org .. 'meters:' .. subject
  redis.call('HSET', meters, field, exact(used) .. ' ' .. exact(now) .. ' ' .. exact(held))
  redis.call('PEXPIRE', meters, 2 * DAY)
end

-- What counts on a meter of a kind: requests, tokens, input or output tokens.
local function amount(kind, input, output)
  if kind == 'r' then return 0 end
  return (kind == 'o' and 0 or input) + (kind == 'i' and 0 or output)
end

local function worth(unit, prices, input, output)
  if unit == 'usd' then return input * prices[1] + output * prices[2] end
  return input + output
end

-- One part of a reservation comes to its end: with what it has used, or (nil) it was never taken up. Returns whether
-- there was anything to settle, so that it is done once.
local function settle(id, part, input, output)
  local key = org .. 'reservation:' .. id
  local packed = redis.call('GET', key)
  local r = packed and cmsgpack.unpack(packed)
  local reserved = r and r.parts[part]
  if not reserved then return false end
  r.parts[part] = nil
  r.kept = r.kept or input ~= nil
  local last = next(r.parts) == nil
  for _, m in ipairs(r.meters) do
    local subject, field, kind, limit, period = unpack(m)
    local used, held = read_meter(redis.call('HGET', org .. 'meters:' .. subject, field), limit, period)
    if kind == 'r' then
      if last and not r.kept then write_meter(subject, field, math.max(0, used - 1), held) end
    else
      local really = input and amount(kind, input, output) or 0
      write_meter(subject, field, used + really, math.max(0, held - amount(kind, reserved[1], reserved[2])))
    end
  end
  for _, b in ipairs(r.budgets) do
    redis.call('HINCRBY', org .. 'spent:' .. b[1], b[2] .. ':held',
      0 - worth(b[3], r.prices, reserved[1], reserved[2])) -- 0 minus it: never "-0", which is no integer to the store
  end
  if last then
    for _, gate in ipairs(r.gates) do redis.call('SREM', org .. gate, id) end
    redis.call('DEL', key)
    redis.call('ZREM', org .. 'reservations', id)
  else
    redis.call('SET', key, cmsgpack.pack(r))
  end
  return true
end
