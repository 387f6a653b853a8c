-- Base64 of a short text, for the bodies of etcd's gateway.
local alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
local base64 = {}

function base64.encode(text)
  local out = {}
  for i = 1, #text, 3 do
    local a, b, c = text:byte(i, i + 2)
    local n = a * 65536 + (b or 0) * 256 + (c or 0)
    for place = 1, 4 do
      local digit = math.floor(n / 64 ^ (4 - place)) % 64
      local is_padding = (place == 3 and not b) or (place == 4 and not c)
      out[#out + 1] = is_padding and "=" or alphabet:sub(digit + 1, digit + 1)
    end
  end
  return table.concat(out)
end

return base64
