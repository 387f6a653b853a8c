# frozen_string_literal: true

module Volcano
  # What has a secret inside does not show its inside.
  # @api private
  module Discreet
    def inspect
      "#<#{self.class}>"
    end
    alias to_s inspect
  end
end
