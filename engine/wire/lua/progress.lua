-- PROGRESS: records one iteration's frames, so that another engine can go on after this one's death.
-- ARGV: engine, msgpack of rows {id, epoch, seq, seq after it, true if it is the last, frame}.
-- Returns the ids that are no longer this engine's. A frame already recorded (a repeat after a lost reply) is passed
-- over, and so is one beyond a gap (the store lost its last second): what is recorded is always without a gap, and
-- the next engine computes the rest again.
local engine = ARGV[1]
local fenced = {}
for _, row in ipairs(cmsgpack.unpack(ARGV[2])) do
  local id, epoch, seq, seq_after, last, frame = unpack(row)
  local request = pool .. 'request:' .. id
  local f = redis.call('HMGET', request, 'engine', 'epoch', 'seq', 'done')
  if f[1] ~= engine or tonumber(f[2]) ~= epoch then
    fenced[#fenced + 1] = id
  elseif not f[4] and tonumber(f[3]) == seq then
    local progress = pool .. 'progress:' .. id
    if redis.call('APPEND', progress, struct.pack('>I4', #frame) .. frame) == #frame + 4 then
      redis.call('PEXPIRE', progress, DAY)
    end
    if last then
      redis.call('HSET', request, 'seq', seq_after, 'done', 1)
    else
      redis.call('HSET', request, 'seq', seq_after)
    end
  end
end
return fenced
