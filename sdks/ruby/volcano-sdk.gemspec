# frozen_string_literal: true

require_relative "lib/volcano/version"

Gem::Specification.new do |spec|
  spec.name = "volcano-sdk"
  spec.version = Volcano::VERSION
  spec.authors = ["The Volcano Locks authors"]
  spec.summary = "A lock that several machines agree on, as a block"
  spec.description = "Leases with fencing tokens from a Volcano lock server: taken, renewed, watched and given back around a block. No dependencies."
  spec.license = "Apache-2.0"
  spec.required_ruby_version = ">= 3.1"
  spec.require_paths = ["lib"]
  spec.files = Dir["lib/**/*.rb", "sig/**/*.rbs", "README.md", "CHANGELOG.md", "LICENSE", base: __dir__].sort
  spec.metadata = { "rubygems_mfa_required" => "true" }
end
