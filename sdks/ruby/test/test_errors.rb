# frozen_string_literal: true

require "test_helper"

class TestErrors < VolcanoTest
  E = Volcano::Error

  def test_the_tree_is_as_drawn
    assert_equal(StandardError, E.superclass)
    assert_equal(E::AuthenticationError, E::PermissionDeniedError.superclass)
    %i[ValidationError AuthenticationError NotFoundError ConflictError LockLostError RateLimitedError ServerError TransportError].each do |name|
      assert_equal(E, E.const_get(name).superclass)
    end
  end

  def test_a_companion_travels_at_the_end_of_the_causes
    root = RuntimeError.new("root")
    top = E.with_cause(RuntimeError.new("top"), root)
    companion = E::LockLostError.new("lost")

    E.put_beside(top, companion)

    assert_equal([top, root, companion], E.chain(top))
  end

  def test_a_companion_that_travels_already_is_not_added
    companion = E::LockLostError.new("lost")
    top = E.with_cause(RuntimeError.new("top"), companion)

    E.put_beside(top, companion)
    E.put_beside(companion, top)

    assert_equal([top, companion], E.chain(top))
  end

  def test_a_cause_is_set_whatever_error_is_being_handled
    raise "an older error"
  rescue RuntimeError
    ours = E.with_cause(E.new("ours"), nil)
    assert_nil(ours.cause)
    raised = assert_raises(E) { raise ours, cause: ours.cause }
    assert_nil(raised.cause)
    assert_match(/test_errors.rb/, raised.backtrace.first)
  end

  def test_a_loss_that_is_raised_again_is_known_as_the_same
    loss = E.with_cause(E::LockLostError.new("lost", status: 409, code: "c", request_id: "r"), E::ConflictError.new("no"))
    again = loss.again

    refute_same(loss, again)
    assert_equal([409, "c", "r", "lost"], [again.status, again.code, again.request_id, again.message])
    assert_same(loss.cause, again.cause)
    assert(loss.travels_with?(E.with_cause(RuntimeError.new("wrapped"), again)))
    refute(loss.travels_with?(E::LockLostError.new("lost")))
  end
end
