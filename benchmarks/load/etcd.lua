-- etcd through its HTTP gateway: put-if-absent in a transaction, deleted again.
-- Arguments: a word that is not used, the number of the run, and
--   each      a lease is granted for each lock and revoked to release it: three requests a lock
--   session   all locks of this run hang on one lease: two requests a lock
local common = require("common")
local PIPE = 192
local base64 = require("base64")

function setup(thread)
  common.setup(thread)
end

function init(arguments)
  run, mode = tonumber(arguments[2]), arguments[3]
  sent = -1
  acquired, released, granted = 0, 0, 0
end

local function post(path, body)
  return wrk.format("POST", path, { ["Content-Type"] = "application/json" }, body)
end

local function lease(n)
  return run * 100000000 + number * 10000000 + n + 1
end

local function key(n)
  return base64.encode(string.format("bench-%d-%d-%d", run, number, n))
end

local function grant(n)
  return post("/v3/lease/grant", string.format('{"TTL":60,"ID":%d}', lease(n)))
end

local function put(n, with)
  local k = key(n)
  return post("/v3/kv/txn", string.format(
    '{"compare":[{"target":"CREATE","key":"%s","create_revision":"0"}],"success":[{"request_put":{"key":"%s","value":"dA==","lease":%d}}]}',
    k, k, lease(with)))
end

function request()
  if sent < 0 then return common.discarded() end
  sent = sent + 1
  if mode == "session" then
    if sent == 1 then return grant(0) end
    -- Until the lease is there for sure, ask for it only.
    if sent <= 64 then return post("/v3/lease/timetolive", string.format('{"ID":%d}', lease(0))) end
    if sent <= PIPE + 64 or sent % 2 == 0 then
      acquired = acquired + 1
      return put(acquired, 0)
    end
    released = released + 1
    return post("/v3/kv/deleterange", string.format('{"key":"%s"}', key(released)))
  end
  -- Each step begins PIPE requests after the one before it was sent.
  local turn = sent <= PIPE * 2 and 0 or sent <= PIPE * 3 and 1 or sent % 3
  if turn == 0 then
    granted = granted + 1
    return grant(granted)
  end
  if turn == 1 then
    acquired = acquired + 1
    return put(acquired, acquired)
  end
  released = released + 1
  return post("/v3/lease/revoke", string.format('{"ID":%d}', lease(released)))
end

function done(summary, latency, _)
  -- The first put of a lease may overtake its grant.
  common.done(summary, latency, 0.01)
end
