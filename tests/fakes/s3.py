"""moto's server with the one promise of S3 that moto breaks: of two concurrent conditional writes, one is refused.

moto looks for the object and stores it in two steps, in a thread for each request
(`S3Response.put_object`, moto 5.2.5); S3 promises both as one:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
"""

from __future__ import annotations

import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_one_at_a_time = threading.Lock()
_put_object = S3Response.put_object


def put_object(response: S3Response) -> Any:
    with _one_at_a_time:
        return _put_object(response)


if __name__ == "__main__":
    S3Response.put_object = put_object  # type: ignore[method-assign]
    main()
