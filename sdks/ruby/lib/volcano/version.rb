# frozen_string_literal: true

module Volcano
  VERSION = "0.1.0"
end
