-- Renewals of some leases in turn, after each was acquired once, or `held`: by an earlier run of this number.
-- Arguments: the service key, the number of the run, how many leases, held or nothing.
local common = require("common")

function setup(thread)
  common.setup(thread)
end

function init(arguments)
  service_key, run = arguments[1], tonumber(arguments[2])
  leases = tonumber(arguments[3])
  to_acquire = arguments[4] == "held" and 0 or leases
  sent = -1
end

function request()
  if sent < 0 then return common.discarded() end
  sent = sent + 1
  local n = sent % leases
  local key = string.format("renewed-%d-%d-%d", run, number, n)
  return common.lease(sent <= to_acquire and "POST" or "PATCH", key, n, '{"ttl_seconds":300}')
end

function done(summary, latency, _)
  common.done(summary, latency, 0)
end
