-- PROGRESS: records one iteration's frames, so that another engine can go on after this one's death. They go into the
-- engine's journal in one piece; request by request they are folded into its own progress later, a few in each
-- iteration, and all that is left when the engine has gone. So an iteration costs few commands, however many rows it has.
-- ARGV: engine, the frames, number of entries that the journal keeps; then for each request whose turn it is: id, state
-- before, state after, all its frames in between. A state is `epoch seq`, with ` done` after the last frame: what
-- `owned` holds for the request.
local engine, frames, kept = ARGV[1], ARGV[2], tonumber(ARGV[3])
local journal, owned = pool .. 'journal:' .. engine, pool .. 'owned:' .. engine
if not redis.call('ZSCORE', pool .. 'engines', engine) then return 0 end -- fenced: CLAIM says so
if frames ~= '' then
  local length = redis.call('RPUSH', journal, frames)
  if length > 2 * kept then redis.call('LTRIM', journal, -kept, -1) end
  if length == 1 or length > 2 * kept then redis.call('PEXPIRE', journal, DAY) end
end
for i = 4, #ARGV, 4 do
  local id, before, after, unfolded = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if redis.call('HGET', owned, id) == before then
    add_progress(id, unfolded)
    redis.call('HSET', owned, id, after)
  else -- a repeat after a lost reply, or the store lost its last second
    fold(engine, {unfolded})
  end
end
local trial = redis.call('HGET', pool .. 'trials', engine)
if trial then
  local epoch = string.match(redis.call('HGET', owned, trial) or '', '^%d+')
  for f in each_frame(frames) do
    if f[1] == trial and tostring(f[2]) == epoch and #f[4] > 0 then -- it has survived a token
      redis.call('HDEL', pool .. 'trials', engine)
      redis.call('HDEL', pool .. 'request:' .. trial, 'suspect')
    end
  end
end
return 1
