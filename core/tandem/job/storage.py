"""The storage of a job's run directory: a volume, a bucket beside it, or a bucket alone (docs/storage.md)."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tandem.model import Model, ObjectName, PerhapsName, Rule

BUCKET_URL = r"^(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)+$"


class Storage(Model):
    """The volume that trainer and evaluators share, and the bucket to which its content is brought."""

    bucket: Annotated[str, Field(pattern=BUCKET_URL, max_length=512)] | None = None
    """Place in an object store, such as `s3://bucket/runs/digits`, `gs://…` or `az://container/…`: checkpoints, scores
    and logs are uploaded while the job runs, and a job whose run directory is empty continues from there. One run for
    each prefix. Credentials come from the environment."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/@?#]+(/[^@?#]*)?$", max_length=512)] | None = None
    """URL of the bucket's server, where it is not the provider's own."""
    region: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$", max_length=64)] | None = None
    """Region of the bucket, for S3."""
    credentials_secret: ObjectName | None = None
    """Secret with the bucket's credentials, by the names of their variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    GOOGLE_SERVICE_ACCOUNT_KEY, AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY. Without one, the identity of the
    coordinator's pod counts, and that of all pods where `shared` is false. `tandem run` does not use it."""
    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim to use."""
    size: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$", max_length=64)] | None = None
    """Size of the claim to create, such as 500Mi or 1Ti. Default: the operator's setting, or else 10Gi."""
    storage_class_name: PerhapsName | None = None
    """Storage class of the claim to create. Default: the operator's setting, or else the cluster's default."""
    access_modes: (
        Annotated[list[Literal["ReadWriteMany", "ReadWriteOnce"]], Field(min_length=1, max_length=2)] | None
    ) = None
    """Access modes of the claim to create. Default: the operator's setting, or else ReadWriteMany. ReadWriteOnce keeps
    all pods on one node."""
    retain: bool = True
    """Whether the volume outlives the job."""
    shared: bool = True
    """Whether all processes use one directory. `false`: each pod has a directory of its own, which the bucket keeps
    equal to the others, and no volume is claimed. `tandem run` and SLURM do not use it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: not s.claim_name or (s.size is None and s.storage_class_name is None),
            "!has(self.claimName) || (!has(self.size) && !has(self.storageClassName))",
            "an existing claimName has its own size and storageClassName; omit those",
            "claimName",
        ),
        Rule(
            lambda s: s.bucket is not None or (s.endpoint, s.region, s.credentials_secret) == (None, None, None),
            "has(self.bucket) || (!has(self.endpoint) && !has(self.region) && !has(self.credentialsSecret))",
            "endpoint, region and credentialsSecret belong to a bucket",
            "bucket",
        ),
        Rule(
            lambda s: (
                s.shared
                or (
                    s.bucket is not None and (s.claim_name, s.size, s.storage_class_name, s.access_modes) == (None,) * 4
                )
            ),
            "self.shared || (has(self.bucket) && !has(self.claimName) && !has(self.size) && "
            "!has(self.storageClassName) && !has(self.accessModes))",
            "a job without a shared directory needs a bucket, and has no volume: omit claimName, size, "
            "storageClassName and accessModes",
            "shared",
        ),
    )


BUCKET_FIELDS = ("bucket", "endpoint", "region", "credentials_secret")
"""Fields of a storage that belong to its bucket."""


def _shared_only(is_used: Callable[[Any], bool], in_cel: str, message: str, field: str) -> Rule:
    """A rule of the job's spec: this is not used where pods share no directory."""
    return Rule(
        lambda spec: spec.checkpoint.storage.shared or not is_used(spec),
        f"self.checkpoint.storage.shared || !({in_cel})",
        message,
        field,
    )


def _names_run_dir(part: str) -> str:
    """CEL expression: whether a list of words of the trainer names the run directory."""
    return f"(has(self.trainer.{part}) && self.trainer.{part}.exists(word, word.contains('TANDEM_RUN_DIR')))"


RULES: tuple[Rule, ...] = (
    _shared_only(
        lambda spec: spec.checkpoint.on_existing == "Fresh",
        "self.checkpoint.onExisting == 'Fresh'",
        "without a shared directory, Fresh would delete the earlier run in the bucket; choose another prefix for "
        "checkpoint.storage.bucket",
        "checkpoint.onExisting",
    ),
    _shared_only(
        lambda spec: spec.trainer.code is not None,
        "has(self.trainer.code)",
        "packed code is stored in a directory that all pods share (checkpoint.storage.shared); build it into the image",
        "trainer.code",
    ),
    _shared_only(
        lambda spec: spec.evaluators is not None and spec.evaluators.watch is not None,
        "has(self.evaluators) && has(self.evaluators.watch)",
        "checkpoints in a script's own format are not brought into the bucket, so evaluators need a directory that "
        "all pods share (checkpoint.storage.shared); save through a session",
        "evaluators.watch",
    ),
    _shared_only(
        lambda spec: any("TANDEM_RUN_DIR" in word for word in [*(spec.trainer.command or []), *spec.trainer.args]),
        f"{_names_run_dir('command')} || {_names_run_dir('args')}",
        "files that a script writes into $TANDEM_RUN_DIR are not brought into the bucket, and are lost with their pod "
        "unless all pods share a directory (checkpoint.storage.shared); save through a session",
        "trainer.args",
    ),
)
"""Rules of the job's spec. In a script, files that it finds by the environment alone are not seen here."""
