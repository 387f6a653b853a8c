# frozen_string_literal: true

# For those who let Bundler require the gem by its name.
require "volcano"
