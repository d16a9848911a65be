-- POST: takes entries of a pool's ledger onto the organisation's books, each once: settles reservations, counts what was
-- used, and keeps the entry. What has been posted before is passed over, so that any gateway may post, twice as well.
-- ARGV[1]: pool, entries, watches, milliseconds that the ledger and the counts by day are kept; in msgpack. An entry is
-- {its id in the pool's ledger, reservation, part, input, cached, output, cost, project, key, group, {{width, start}},
-- {period}, field, value, …}; `group` says what counts are kept by. A watch is {period, field, amount, audit entry}: the
-- first time that `amount` is reached the audit entry is written. Returns {number posted, places of watches, …}.
local pool, entries, watches, ledger_life, usage_life = unpack(cmsgpack.unpack(ARGV[1]))
local posted = redis.call('HGET', org .. 'posted', pool) or '0-0'
local LIVES = {['1m'] = 26 * 3600000, ['1h'] = 32 * DAY, ['1d'] = usage_life}

local function is_after(one, other)
  local a, b = string.match(one, '^(%d+)-(%d+)$')
  local c, d = string.match(other, '^(%d+)-(%d+)$')
  a, b, c, d = tonumber(a), tonumber(b), tonumber(c), tonumber(d)
  return a > c or (a == c and b > d)
end

local function count(width, start, group, input, cached, output, cost)
  local usage = org .. 'usage:' .. width .. ':' .. start
  local n, i, c, o, usd = string.match(redis.call('HGET', usage, group) or '0 0 0 0 0', '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
  redis.call('HSET', usage, group,
    string.format('%d %d %d %d %d', n + 1, i + input, c + cached, o + output, usd + cost))
  redis.call('PEXPIRE', usage, LIVES[width])
end

local function spend(period, subject, tokens, cost)
  redis.call('HINCRBY', org .. 'spent:' .. period, subject .. ':tokens', tokens)
  redis.call('HINCRBY', org .. 'spent:' .. period, subject .. ':usd', cost)
end

local before = {}
for i, w in ipairs(watches) do before[i] = tonumber(redis.call('HGET', org .. 'spent:' .. w[1], w[2]) or 0) end

local number = 0
for _, e in ipairs(entries) do
  local at, reservation, part, input, cached, output, cost, project, key, group, buckets, periods = unpack(e, 1, 12)
  if is_after(at, posted) then
    settle(reservation, part, input, output)
    for _, bucket in ipairs(buckets) do count(bucket[1], bucket[2], group, input, cached, output, cost) end
    for _, period in ipairs(periods) do
      for _, subject in ipairs({key, project, 'organization'}) do spend(period, subject, input + output, cost) end
      redis.call('PEXPIRE', org .. 'spent:' .. period, 70 * DAY)
    end
    redis.call('HSET', org .. 'last_used', key, math.floor(now / 1000))
    redis.call('XADD', org .. 'ledger', 'MINID', '~', math.floor(now - ledger_life), '*', unpack(e, 13))
    posted, number = at, number + 1
  end
end
if number == 0 then return {0} end
redis.call('HSET', org .. 'posted', pool, posted)

local reply = {number}
for i, w in ipairs(watches) do
  local after = tonumber(redis.call('HGET', org .. 'spent:' .. w[1], w[2]) or 0)
  if before[i] < w[3] and after >= w[3] then
    redis.call('XADD', org .. 'audit', 'MAXLEN', '~', 100000, '*', 'entry', w[4])
    reply[#reply + 1] = i
  end
end
return reply
