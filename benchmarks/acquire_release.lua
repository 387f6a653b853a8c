-- Acquire and release of distinct keys.  wrk does not tie requests to connections, so a key is released
-- PIPE requests after its acquire was sent: far more than there are connections, so it has been granted.
local KEYS = 10000
local PIPE = 256
local UUID = "%08x-0000-4000-8000-%012x"

local threads = 0

function setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

function init(arguments)
  service_key = arguments[1]
  run = tonumber(arguments[2])
  sent, acquired, released = 0, 0, 0
end

local function lease(method, n, body)
  -- Each run has keys of its own: what the last one did not release is still held.
  local path = string.format("/locks/bench-%d-%d-%d/lease", run, number, n % KEYS)
  return wrk.format(method, path, {
    ["Authorization"] = "Bearer " .. service_key,
    ["Content-Type"] = "application/json",
    ["X-Volcano-Lock-Token"] = string.format(UUID, run * 64 + number, n),
    ["X-Volcano-Request-Id"] = string.format(UUID, run, sent),
  }, body)
end

function request()
  sent = sent + 1
  -- The first PIPE requests acquire; from then on a release and an acquire take turns.
  if sent <= PIPE or sent % 2 == 0 then
    acquired = acquired + 1
    return lease("POST", acquired, '{"ttl_seconds":30}')
  end
  released = released + 1
  return lease("DELETE", released)
end

function done(summary, latency, _)
  io.write(string.format(
    '{"requests":%d,"seconds":%.6f,"refused":%d,"broken":%d,"p50_ms":%.3f,"p99_ms":%.3f}\n',
    summary.requests, summary.duration / 1e6, summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
