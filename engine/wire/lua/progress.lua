-- PROGRESS: records one iteration's frames, so that another engine can go on after this one's death.
-- ARGV: engine, msgpack of the requests' ids, msgpack of index of the id, state before, state after, bytes of each row,
-- and the frames' bytes end to end, each behind its length. A state is `epoch seq`, with ` done` after the last frame:
-- what `owned` holds for the request.
-- Returns the ids that are no longer this engine's. A frame already recorded (a repeat after a lost reply) is passed
-- over, and so is one beyond a gap (the store lost its last second): what is recorded is always without a gap, and
-- the next engine computes the rest again.
local engine = ARGV[1]
local owned, ids = pool .. 'owned:' .. engine, cmsgpack.unpack(ARGV[2])
local held = redis.call('HMGET', owned, unpack(ids))
local trial = redis.call('HGET', pool .. 'trials', engine)
local fenced, latest, changed = {}, {}, {}
local at = 0
local rows = cmsgpack.unpack(ARGV[3]) -- flat: a table for each would cost more than all else here
for i = 1, #rows, 4 do
  local index, before, after, size = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
  local id, state = ids[index], latest[index] or held[index] or ''
  if state == before then
    local progress = pool .. 'progress:' .. id
    if redis.call('APPEND', progress, string.sub(ARGV[4], at + 1, at + size)) == size then
      redis.call('PEXPIRE', progress, DAY)
    end
    latest[index] = after
    if id == trial and after ~= before .. ' done' then -- it has survived a token
      redis.call('HDEL', pool .. 'trials', engine)
      redis.call('HDEL', pool .. 'request:' .. id, 'suspect')
    end
  elseif string.match(state, '^%d+') ~= string.match(before, '^%d+') then
    fenced[#fenced + 1] = id
  end
  at = at + size
end
for index, state in pairs(latest) do changed[#changed + 1], changed[#changed + 2] = ids[index], state end
if #changed > 0 then redis.call('HSET', owned, unpack(changed)) end
return fenced
