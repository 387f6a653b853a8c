# frozen_string_literal: true

# Run with `-r rbs/test/setup`: each call and each return, also inside the SDK, is compared with sig/*.rbs.

require "test_helper"
require_relative "test_operations"
require_relative "test_renewal"
require_relative "test_errors"
require_relative "test_lease"
require_relative "test_guard"
require_relative "test_keeper"
require_relative "test_locks"
require_relative "test_lane"
require_relative "test_transport"
require_relative "test_events"
require_relative "test_waiting"
require_relative "test_stream"
require_relative "test_waiting_room"

# So many checks take long, and the last is about how long things take.
TestRenewal.remove_method(:test_two_thousand_leases_survive_an_outage_at_a_random_moment)
TestKeeper.remove_method(:test_no_more_than_five_hundred_share_a_request)
TestWaitingRoom.remove_method(:test_a_timeout_at_any_moment_leaves_no_lease_behind)
# The check itself refuses what these hand over.
TestLocks.remove_method(:test_wrong_arguments_are_refused_before_anything_is_sent)
TestGuard.remove_method(:test_on_lost_wants_a_block)

class TestSignatures < VolcanoTest
  def test_the_check_is_on
    error = assert_raises(RBS::Test::Tester::TypeError) { Volcano::Renewal.renewal_delay("30", 29, 0) }

    assert_match(/renewal_delay/, error.message)
  end

  # Only with a block: the check would read an Enumerator to its end, and a watch has none.
  def test_a_watch
    server = ScriptedServer.open { |request| request.number == 1 ? request.refuse(503, "x") : [request.open_stream_head, request.tell("released"), request.hang] }

    assert_equal("k", client(server.url).locks.watch(key: "k", prefix: %w[a b]) { |event| break event.key })
    server.close
  end
end
