# frozen_string_literal: true

require "test_helper"
require "pp"

class TestLease < VolcanoTest
  LEASE = { key: "nightly", token: TOKEN, expires_at: Time.utc(2026, 11, 29, 12), fencing_token: 7 }.freeze

  def test_a_lease_is_frozen_and_equal_by_value
    lease = Volcano::LockLease.new(**LEASE)

    assert_predicate(lease, :frozen?)
    assert_equal(lease, Volcano::LockLease.new(**LEASE))
    assert_equal(1, { lease => 1 }[Volcano::LockLease.new(**LEASE)])
    refute_equal(lease, Volcano::LockLease.new(**LEASE, fencing_token: 8))
    refute_equal(lease, LEASE)
  end

  def test_a_lease_does_not_show_its_token
    lease = Volcano::LockLease.new(**LEASE)

    [lease.inspect, lease.to_s, "#{lease}", PP.pp(lease, +""), [lease].inspect].each { |text| refute_match(/#{TOKEN}/, text) }
    assert_match(/"nightly" fencing_token=7/, lease.inspect)
  end

  def test_leases_and_states_can_be_matched
    Volcano::LockLease.new(**LEASE) => { key:, fencing_token: }
    Volcano::LockState.new(held: false) => { held:, expires_at: nil }

    assert_equal(["nightly", 7, false], [key, fencing_token, held])
  end

  def test_a_state_is_frozen_and_equal_by_value
    state = Volcano::LockState.new(held: true, fencing_token: 7, expires_at: LEASE[:expires_at])

    assert_predicate(state, :frozen?)
    assert_predicate(state, :held?)
    assert_equal(state, Volcano::LockState.new(held: true, fencing_token: 7, expires_at: LEASE[:expires_at]))
    refute_predicate(Volcano::LockState.new(held: false), :held?)
    assert_match(/held=true fencing_token=7/, state.inspect)
  end
end
