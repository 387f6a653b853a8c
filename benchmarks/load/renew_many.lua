-- Renewals of leases in turn, BATCH in a request, which a run of renew.lua of this number has acquired.
-- Arguments: the service key, the number of the run, how many leases.
local common = require("common")
local BATCH = 100
local threads = {}

function setup(thread)
  common.setup(thread)
  threads[#threads + 1] = thread
end

function init(arguments)
  service_key, run = arguments[1], tonumber(arguments[2])
  sent, refused, bodies = -1, 0, {}
  for first = 0, tonumber(arguments[3]) - 1, BATCH do
    local leases = {}
    for n = first, first + BATCH - 1 do
      leases[#leases + 1] = string.format(
        '{"key":"renewed-%d-%d-%d","token":"%s","ttl_seconds":300}', run, number, n, common.token(n))
    end
    bodies[#bodies + 1] = '{"leases":[' .. table.concat(leases, ",") .. "]}"
  end
end

function request()
  if sent < 0 then return common.discarded() end
  sent = sent + 1
  return common.many(bodies[sent % #bodies + 1])
end

-- Each lease in it is answered for itself: an error among them is a refusal that the status does not show.
function response(_, _, body)
  if body:find('"code"', 1, true) then refused = refused + 1 end
end

function done(summary, latency, _)
  for _, thread in ipairs(threads) do
    summary.errors.status = summary.errors.status + thread:get("refused")
  end
  common.done(summary, latency, 0)
end
