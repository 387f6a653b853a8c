-- Acquire and release of distinct keys.  wrk does not tie requests to connections, so a key is released
-- PIPE requests after its acquire was sent: far more than there are connections, so it has been granted.
-- Arguments: the service key, the number of the run, and how keys are named:
--   fresh (the default)   each run has its own: what the last one did not release is still held
--   stored N              at random among the N names that measures/stored.py made: free, with a slot
local common = require("common")
local PIPE = 512

function setup(thread)
  common.setup(thread)
end

function init(arguments)
  service_key, run = arguments[1], tonumber(arguments[2])
  stored = arguments[3] == "stored" and tonumber(arguments[4])
  math.randomseed(run)
  sent, acquired, released, keys = -1, 0, 0, {}
end

local function name(n)
  if not stored then return string.format("bench-%d-%d-%d", run, number, n) end
  return string.format("dead-%d", math.random(0, stored - 1))
end

function request()
  if sent < 0 then return common.discarded() end
  sent = sent + 1
  -- The first PIPE requests acquire; from then on a release and an acquire take turns.
  if sent <= PIPE or sent % 2 == 0 then
    acquired = acquired + 1
    keys[acquired] = name(acquired)
    return common.lease("POST", keys[acquired], acquired, '{"ttl_seconds":30}')
  end
  released = released + 1
  local key = keys[released]
  keys[released] = nil
  return common.lease("DELETE", key, released)
end

function done(summary, latency, _)
  -- Two draws of one stored name may meet.
  common.done(summary, latency, 0.02)
end
