"""A stack's encryption key under the engine: granted first and then used, and refused while its owner has granted nothing."""

from __future__ import annotations

from tests.engine.google_plugin import project_number
from tests.engine.google_refusals import KEY_USERS
from tests.engine.harness import PACK, Lab
from tests.engine.test_adoption import seed

PLACE = "locations/us-central1/keyRings/lab/cryptoKeys/work"
GRANT = "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember"
ROLE = "roles/cloudkms.cryptoKeyEncrypterDecrypter"


def set_key(lab: Lab, project: str) -> str:
    key = f"projects/{project}/{PLACE}"
    lab.init("dev")
    lab.set("dev", "kms_key", key)
    lab.set("dev", "secrets.hf-token.regions", ["us-central1"])
    return key


def test_key_of_the_own_project_is_granted_and_used_in_one_up(lab: Lab) -> None:
    key = set_key(lab, "my-lab-dev")

    lab.up("dev", *PACK)

    world = lab.cloud.world().resources
    made = {each["type"]: each["inputs"] for each in world.values()}
    assert {each["inputs"]["cryptoKeyId"] for each in world.values() if each["type"] == GRANT} == {key}
    assert made["gcp:storage/bucket:Bucket"]["encryption"] == {"defaultKmsKeyName": key}
    assert made["gcp:pubsub/topic:Topic"]["kmsKeyName"] == key
    assert made["gcp:artifactregistry/repository:Repository"]["kmsKeyName"] == key
    assert lab.preview("dev", "--refresh", *PACK) == []


def test_key_of_another_project_is_refused_until_its_owner_has_granted_it(lab: Lab) -> None:
    key = set_key(lab, "keys-1")

    said = lab.up("dev", *PACK, check=False)
    assert said.code != 0
    assert "Error 403: Permission denied on Cloud KMS key" in said.text
    assert lab.cloud.ids(":Topic") == []

    number = project_number("my-lab-dev")
    for domain in KEY_USERS.values():
        member = f"serviceAccount:service-{number}@{domain}.iam.gserviceaccount.com"
        seed(lab.cloud, GRANT, f"{key}/{domain}", cryptoKeyId=key, role=ROLE, member=member)
    lab.up("dev", *PACK)

    assert len(lab.cloud.ids(":Topic")) == 2
    assert lab.preview("dev", "--refresh", *PACK) == []
