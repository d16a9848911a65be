-- First lines of every script on a tenant's records. KEYS[1] is the prefix of one kind, `noria:{tenant}:records:<kind>:`;
-- ARGV[1] the part of it that has an index of its own. Beside each record (`entry:`, `chunks:`) there are, per kind,
-- `expiry` (part/id -> when it goes), `sizes` (part/id -> bytes) and `bytes` (their sum), and per part its `index:`
-- (id -> created). Records go by their own time to live; whoever comes by next takes them off the books.
local kind, part = KEYS[1], ARGV[1]
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)
local HOUR = 3600000
local index, expiry, sizes, bytes = kind .. 'index:' .. part, kind .. 'expiry', kind .. 'sizes', kind .. 'bytes'

local function name_of(id) return part .. '/' .. id end

local function size_of(name) return tonumber(redis.call('HGET', sizes, name) or 0) end

local function set_size(name, size)
  redis.call('INCRBY', bytes, size - size_of(name))
  redis.call('HSET', sizes, name, size)
end

-- Takes one record away, and off the books.
local function drop(name)
  local there = redis.call('DEL', kind .. 'entry:' .. name, kind .. 'chunks:' .. name)
  local of, id = string.match(name, '^(.*)/([^/]*)$')
  redis.call('ZREM', kind .. 'index:' .. of, id)
  redis.call('ZREM', expiry, name)
  redis.call('DECRBY', bytes, size_of(name))
  redis.call('HDEL', sizes, name)
  if redis.call('EXISTS', sizes) == 0 then redis.call('DEL', bytes) end
  return there
end

local function sweep()
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, 500)) do drop(name) end
end

-- From now on the record lives `ttl` milliseconds more, unless it lives longer already. The books outlive it.
local function live(name, ttl)
  redis.call('ZADD', expiry, 'GT', now + ttl, name)
  local at = redis.call('ZSCORE', expiry, name)
  redis.call('PEXPIREAT', kind .. 'entry:' .. name, at)
  redis.call('PEXPIREAT', kind .. 'chunks:' .. name, at)
  for _, book in ipairs({kind .. 'index:' .. string.match(name, '^(.*)/'), expiry, sizes, bytes}) do
    redis.call('PEXPIRE', book, ttl + HOUR, redis.call('PTTL', book) < 0 and 'NX' or 'GT')
  end
end

-- Whether so much more fits; with `evict` the oldest of this part make room.
local function fits(more_records, more_bytes, max_records, max_bytes, evict, keep)
  local function over()
    return redis.call('HLEN', sizes) + more_records > max_records
      or tonumber(redis.call('GET', bytes) or 0) + more_bytes > max_bytes
  end
  while over() do
    local oldest = evict and redis.call('ZRANGE', index, 0, 1) or {}
    local victim = oldest[1] == keep and oldest[2] or oldest[1]
    if not victim then return false end
    drop(name_of(victim))
  end
  return true
end
