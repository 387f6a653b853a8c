# frozen_string_literal: true

# Volcano Locks: a lock that several machines agree on, as a block.
#
#   client = Volcano::Client.new(service_key: ENV.fetch("VOLCANO_SERVICE_KEY"), api_url: "http://127.0.0.1:8000")
#   client.locks.with_lock("nightly-rollup", ttl: 30) do |guard|
#     roll_up(fencing_token: guard.lease.fencing_token) { guard.check! }
#   end
module Volcano
end

require "volcano/version"
require "volcano/errors"
require "volcano/lease"
require "volcano/events"
require "volcano/clock"
require "volcano/client"
