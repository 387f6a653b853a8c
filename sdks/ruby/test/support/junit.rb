# frozen_string_literal: true

require "minitest"

# Writes the counts as JUnit XML to the file that JUNIT_XML names, for CI.
class JUnit < Minitest::StatisticsReporter
  def record(result)
    super
    (@all ||= []) << result
  end

  def report
    super
    File.write(options.fetch(:junit), document)
  end

  private

  def document
    cases = (@all || []).map { |result| test_case(result) }.join
    %(<?xml version="1.0" encoding="UTF-8"?>\n<testsuites><testsuite name="ruby" tests="#{count}" failures="#{failures}" ) +
      %(errors="#{errors}" skipped="#{skips}" time="#{total_time.round(3)}">\n#{cases}</testsuite></testsuites>\n)
  end

  def test_case(result)
    open = %(<testcase classname="#{escape(result.klass)}" name="#{escape(result.name)}" time="#{result.time.round(3)}")
    return "#{open}/>\n" if result.passed?

    kind = { "E" => "error", "S" => "skipped" }.fetch(result.result_code, "failure")
    "#{open}><#{kind} message=\"#{escape(result.failure.message)}\"/></testcase>\n"
  end

  # Only what XML 1.0 allows.
  def escape(text)
    text.dup.force_encoding(Encoding::UTF_8).scrub.gsub(/[^\t\n\r\u0020-\uD7FF\uE000-\uFFFD]/, "?").encode(xml: :text).gsub('"', "&quot;").gsub("\n", "&#10;")
  end
end

module Minitest
  def self.plugin_junit_init(options)
    path = ENV["JUNIT_XML"]
    reporter << JUnit.new(options[:io], options.merge(junit: path)) if path && !path.empty?
  end

  extensions << "junit"
end
