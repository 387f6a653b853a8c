# frozen_string_literal: true

module Volcano
  # A forked child owns no lease, releases nothing and uses no connection of its parent's.
  #
  # What matters asks for the process id (`Client#session`, `LockGuard`), which also covers
  # `Process.daemon`. This hook only lets go of the parent's sockets at once, so that they end when the
  # parent closes them.
  # @api private
  module Fork
    CLIENTS = ObjectSpace::WeakMap.new
    private_constant :CLIENTS

    module Hook
      def _fork
        pid = super
        Fork.happened if pid.zero?
        pid
      end
    end

    def self.watch(client)
      CLIENTS[client] = true
    end

    def self.happened
      CLIENTS.keys.each(&:forked)
    end

    ::Process.singleton_class.prepend(Hook)
  end
end
