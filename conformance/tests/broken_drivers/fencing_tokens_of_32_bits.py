"""Cuts fencing tokens off."""

from dataclasses import replace

from reference_driver import Lease, Response, Sdk, main

CAUGHT_BY = "acquire/big_fencing_tokens_arrive_unchanged"


class Broken(Sdk):
    def _lease_of(self, response: Response, key: str, token: str, status: int) -> Lease:
        lease = super()._lease_of(response, key, token, status)
        return replace(lease, fencing_token=lease.fencing_token & 0xFFFF_FFFF)


if __name__ == "__main__":
    main(Broken)
