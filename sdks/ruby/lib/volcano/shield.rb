# frozen_string_literal: true

module Volcano
  # What keeps the SDK's own steps whole while somebody interrupts the thread that takes them.
  #
  # Ruby interrupts a thread at any method call: `Thread#raise`, `Timeout.timeout` (which unwinds by
  # `throw` up to Ruby 3.1), `Thread#kill`. Under the shield all of these wait. Two things come through any
  # shield, since they run in the main thread itself: SIGINT without a trap, and what a trap handler raises.
  # So a step that must not be lost also stands in an `ensure`.
  #
  # The user's block never runs under it, and interrupts that the caller has masked stay masked: the
  # SDK takes its shield off, it never forces interrupts on.
  # @api private
  module Shield
    EVERYTHING = { Object => :never }.freeze
    NOTHING = { Object => :immediate }.freeze
    private_constant :EVERYTHING, :NOTHING

    def self.up
      Thread.handle_interrupt(EVERYTHING) { yield }
    end

    # A thread of the SDK's own. A new thread inherits its maker's shield and could then never be ended,
    # not even by the end of the process.
    def self.thread(name)
      thread = Thread.new { Thread.handle_interrupt(NOTHING) { yield } }
      thread.name = name
      thread.report_on_exception = false
      thread
    end
  end
end
