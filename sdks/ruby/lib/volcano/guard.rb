# frozen_string_literal: true

require "volcano/errors"

module Volcano
  # What the block of `with_lock` receives: the lease, and whether it may still act.
  #
  # Each question looks at the clock first, so the answer is right also when the process had been
  # stopped or the host asleep. A lost guard never becomes held again. Any thread may ask.
  class LockGuard
    # @api private
    def initialize(keeper, kept)
      @keeper = keeper
      @kept = kept
    end

    # @return [LockLease] as of its latest renewal
    def lease
      @kept.holding.lease
    end

    # May we no longer act?
    def lost?
      !loss.nil?
    end

    # Waits until the lock is lost, or its block has ended.
    #
    # @param timeout [Numeric, nil] seconds to wait at most; nil: as long as it takes
    # @return [Boolean] is it lost?
    def wait_lost(timeout: nil)
      @keeper.wait_lost(@kept, timeout) if @kept.mine?
      lost?
    end

    # Raises when the lock is lost, does nothing otherwise. Call it before each step that needs the lock.
    #
    # @raise [Error::LockLostError]
    # @return [void]
    def check!
      loss = self.loss or return
      again = loss.again
      raise again, cause: again.cause
    end

    # Calls the block with the LockLostError, once, when the lock is lost; soon, if it is lost already.
    # It runs on a thread of the SDK, beside your own code: be brief, and raise nothing.
    #
    # @yieldparam loss [Error::LockLostError]
    # @return [self]
    def on_lost(&block)
      raise ArgumentError, "on_lost needs a block" unless block

      @keeper.on_lost(@kept, block) if @kept.mine?
      self
    end

    def inspect
      "#<#{self.class} #{lease.inspect}>"
    end
    alias to_s inspect

    private

    def loss
      return @keeper.look(@kept) if @kept.mine?

      @forked ||= @kept.holding.forked
    end
  end
end
