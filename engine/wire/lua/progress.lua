-- PROGRESS: records one iteration's frames, so that another engine can go on after this one's death.
-- ARGV: engine, msgpack of ids, msgpack of rows {index of the id, epoch, seq, seq after it, true if it is the last,
-- frame}, the numbers but the first as text.
-- Returns the ids that are no longer this engine's. A frame already recorded (a repeat after a lost reply) is passed
-- over, and so is one beyond a gap (the store lost its last second): what is recorded is always without a gap, and
-- the next engine computes the rest again.
local engine = ARGV[1]
local owned, ids = pool .. 'owned:' .. engine, cmsgpack.unpack(ARGV[2])
local held = redis.call('HMGET', owned, unpack(ids))
local trial = redis.call('HGET', pool .. 'trials', engine)
local fenced, latest, changed = {}, {}, {}
for _, row in ipairs(cmsgpack.unpack(ARGV[3])) do
  local index, epoch, seq, seq_after, last, frame = row[1], row[2], row[3], row[4], row[5], row[6]
  local id, state = ids[index], latest[index] or held[index] or ''
  if state == epoch .. ' ' .. seq then -- a state with its last frame recorded has another form
    local progress = pool .. 'progress:' .. id
    if redis.call('APPEND', progress, struct.pack('>I4', #frame) .. frame) == #frame + 4 then
      redis.call('PEXPIRE', progress, DAY)
    end
    latest[index] = epoch .. ' ' .. seq_after .. (last and ' done' or '')
    if id == trial and seq_after ~= seq then -- it has survived a token
      redis.call('HDEL', pool .. 'trials', engine)
      redis.call('HDEL', pool .. 'request:' .. id, 'suspect')
    end
  elseif string.sub(state, 1, #epoch + 1) ~= epoch .. ' ' then
    fenced[#fenced + 1] = id
  end
end
for index, state in pairs(latest) do changed[#changed + 1], changed[#changed + 2] = ids[index], state end
if #changed > 0 then redis.call('HSET', owned, unpack(changed)) end
return fenced
