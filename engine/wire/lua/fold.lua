-- Second part of the scripts that read an engine's journal: frames end to end, each behind its length in 4 bytes.

-- Iterates over frames: decoded ({id, epoch, seq, token ids, logprobs, finish, …}), and as they are kept.
local function each_frame(frames)
  local at = 1
  return function()
    if at > #frames then return nil end
    local a, b, c, d = string.byte(frames, at, at + 3)
    local first, size = at, ((a * 256 + b) * 256 + c) * 256 + d
    at = first + 4 + size
    return cmsgpack.unpack(string.sub(frames, first + 4, at - 1)), string.sub(frames, first, at - 1)
  end
end

local function add_progress(id, frames)
  local progress = pool .. 'progress:' .. id
  if redis.call('APPEND', progress, frames) == #frames then redis.call('PEXPIRE', progress, DAY) end
end

-- Moves frames into the progress of those requests that the engine owns. One that is there already is passed over, and
-- so is one beyond a gap (the store lost its last second): progress never has a gap, and the next engine computes the
-- rest again.
local function fold(engine, journal)
  local owned, states, changed = pool .. 'owned:' .. engine, {}, {}
  for _, frames in ipairs(journal) do
    for f, kept in each_frame(frames) do
      local id = f[1]
      states[id] = states[id] or redis.call('HGET', owned, id) or ''
      if states[id] == f[2] .. ' ' .. f[3] then
        add_progress(id, kept)
        states[id] = f[2] .. ' ' .. f[3] + #f[4] .. (f[6] and ' done' or '')
        changed[id] = true
      end
    end
  end
  for id in pairs(changed) do redis.call('HSET', owned, id, states[id]) end
end
