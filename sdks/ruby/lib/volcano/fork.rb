# frozen_string_literal: true

module Volcano
  # A forked child owns no lease, releases nothing and uses no connection of its parent's.
  #
  # What matters asks for the process id (`Client#session`, `LockGuard`), which also covers
  # `Process.daemon`. This hook only lets go of the parent's sockets at once, so that they end when the
  # parent closes them.
  # @api private
  module Fork
    # {60 => [Transport, …]} by the client's object id, as long as that client lives and is open. Not a WeakMap:
    # in Ruby 3.1 one may list what is gone.
    TRANSPORTS = {}
    FORGET = ->(object_id) { TRANSPORTS.delete(object_id) }
    private_constant :TRANSPORTS, :FORGET

    module Hook
      def _fork
        pid = super
        Fork.happened if pid.zero?
        pid
      end
    end

    # The transports must not know their client, or it would live for ever.
    def self.watch(client, transports)
      TRANSPORTS[client.object_id] = transports
      ObjectSpace.define_finalizer(client, FORGET)
    end

    def self.unwatch(client)
      FORGET.call(client.object_id)
    end

    def self.watched
      TRANSPORTS.size
    end

    # In the child.
    def self.happened
      TRANSPORTS.values.flatten.each do |transport|
        transport.forget
      rescue StandardError
        nil # that socket stays open in the child; raising here would harm the user's fork
      end
      TRANSPORTS.clear
    end

    ::Process.singleton_class.prepend(Hook)
  end
end
