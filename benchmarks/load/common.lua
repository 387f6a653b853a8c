-- What the scripts share.  The globals service_key, run, sent and number belong to each thread.
local common = {}
local UUID = "%08x-0000-4000-8000-%012x"
local threads = 0

function common.setup(thread)
  thread:set("number", threads)
  threads = threads + 1
end

-- wrk asks for one request before the first, to look at it, and sends it to nobody.
function common.discarded()
  sent = 0
  return wrk.format("GET", "/")
end

function common.lease(method, key, token, body)
  return wrk.format(method, "/locks/" .. key .. "/lease", {
    ["Authorization"] = "Bearer " .. service_key,
    ["Content-Type"] = "application/json",
    ["X-Volcano-Lock-Token"] = common.token(token),
    ["X-Volcano-Request-Id"] = string.format(UUID, run, sent),
  }, body)
end

function common.many(body)
  return wrk.format("PATCH", "/lock-leases", {
    ["Authorization"] = "Bearer " .. service_key,
    ["Content-Type"] = "application/json",
    ["X-Volcano-Request-Id"] = string.format(UUID, run, sent),
  }, body)
end

function common.token(n)
  return string.format(UUID, run * 64 + number, n)
end

-- One line of JSON.  may_refuse: the share of answers that may be none of the 200s.
function common.done(summary, latency, may_refuse)
  io.write(string.format(
    '{"requests":%d,"seconds":%.6f,"refused":%d,"broken":%d,"may_refuse":%f,"p50_ms":%.3f,"p99_ms":%.3f}\n',
    summary.requests, summary.duration / 1e6, summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout,
    may_refuse, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end

return common
