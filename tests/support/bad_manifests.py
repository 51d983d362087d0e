"""Manifests with one mistake each, and what is to be said of it.

The API server must refuse `REFUSED` as well. The rest is what is no YAML, what only a person would type, what nests or
repeats without end.
"""

from collections.abc import Callable
from dataclasses import dataclass

HEAD = "apiVersion: tandem.dev/v1alpha1\nkind: DistributedTrainingJob\n"
NAMED = HEAD + "metadata:\n  name: bad\n"
LANGUAGE_MODEL = NAMED + "spec:\n  trainer:\n    task: causal-lm\n"
OWN_TASK = NAMED + "spec:\n  trainer:\n    task: my_package:MyTask\n"
TASK = NAMED + "spec:\n  trainer:\n    task: image-classification\n"
CONFIG = TASK + "    config:\n"
COMMAND = NAMED + "spec:\n  trainer:\n    command: [python, train.py]\n"
UNSHARED = "  checkpoint: {storage: {bucket: s3://bucket/runs/bad, shared: false}}\n"


@dataclass(frozen=True)
class BadManifest:
    name: str
    text: bytes
    words: str
    """What is said of it, as a regular expression."""
    field: str = ""
    """Which field it is about."""


def _case(name: str, text: str | bytes, words: str, field: str = "") -> BadManifest:
    return BadManifest(name, text.encode() if isinstance(text, str) else text, words, field)


def _below(head: str, indent: int, path: str) -> Callable[..., BadManifest]:
    """Cases of one more line below a manifest's beginning, about the field that it begins with or one inside of it."""

    def case(name: str, line: str, words: str, inside: str = "") -> BadManifest:
        return _case(name, f"{head}{' ' * indent}{line}\n", words, f"{path}{line.partition(':')[0]}{inside}")

    return case


_head, _named = _below(HEAD, 0, ""), _below(NAMED, 0, "")
_spec, _trainer = _below(TASK, 2, "spec."), _below(TASK, 4, "spec.trainer.")
_config, _command = _below(CONFIG, 6, "spec.trainer.config."), _below(COMMAND, 4, "spec.trainer.")
_own_task, _own_trainer = _below(OWN_TASK, 2, "spec."), _below(OWN_TASK, 4, "spec.trainer.")
_language = _below(LANGUAGE_MODEL, 2, "spec.")
_beside_command = _below(COMMAND, 2, "spec.")


def _on(workers: str, head: str = OWN_TASK) -> Callable[..., BadManifest]:
    """Cases of a task that trains on such workers."""
    return _below(head.replace("  trainer", f"  workers: {{{workers}}}\n  trainer"), 4, "spec.trainer.")


def _deep(opening: str, count: int = 20_000) -> str:
    return TASK + "  workers: " + opening * count


REFUSED: tuple[BadManifest, ...] = (
    _trainer("args-for-a-task", "args: [--fast]", "args belong to a command"),
    _trainer("bad-variable-name", "env: [{name: my-level, value: a}]", "match|variable", "[0].name"),
    _trainer(
        "batch-that-leaves-nothing",
        "config: {globalBatchSize: 2048, dropLast: true, data: {name: digits}}",
        "would drop all samples",
        ".globalBatchSize",
    ),
    _spec(
        "claim-with-a-size",
        "checkpoint: {storage: {claimName: shared, size: 10Gi}}",
        "an existing claimName has its own size",
        ".storage.claimName",
    ),
    _trainer(
        "cnn-on-tiny-images",
        "config: {model: cnn, data: {name: synthetic, imageSize: 4}}",
        "at least 6×6 pixels",
        ".model",
    ),
    _command("config-for-a-command", "config: {epochs: 2}", "config belongs to image-classification"),
    _on("processesPerReplica: 2", TASK)(
        "config-split",
        "config: {strategy: fsdp, tensorParallel: 2}",
        "needs a task that defines how matrices are split",
    ),
    _own_trainer(
        "ddp-options-for-fsdp",
        "loop: {strategy: fsdp, ddp: {staticGraph: true}}",
        "which is not the one chosen",
        ".ddp",
    ),
    _trainer(
        "dp-with-recomputation",
        "config: {strategy: dp, activationCheckpointing: true}",
        "does not work in the copies",
        ".activationCheckpointing",
    ),
    _below(CONFIG + "      strategy: dp\n", 2, "spec.")(
        "dp-with-several-processes",
        "workers: {resources: {limits: {nvidia.com/gpu: 2}}}",
        "are for one process",
        ".processesPerReplica",
    ),
    _named("empty-command", "spec: {trainer: {command: []}}", "at least 1", ".trainer.command"),
    _beside_command(
        "evaluators-for-a-command", "evaluators: {replicas: 1}", "set evaluators.command, or omit evaluators"
    ),
    _spec("field-in-the-wrong-place", "replicas: 2", "unknown field"),
    _config("fraction-for-a-whole-number", "globalBatchSize: 64.5", "whole number|integer"),
    _spec(
        "fraction-of-a-cpu-without-quotes",
        "workers: {resources: {requests: {cpu: 0.5}}}",
        "amount|integer|string",
        ".resources.requests.cpu",
    ),
    _spec(
        "half-a-gpu",
        "workers: {resources: {limits: {nvidia.com/gpu: 500m}}}",
        "GPUs come whole|devices come whole",
        ".resources",
    ),
    _beside_command(
        "half-an-amd-gpu",
        "workers: {resources: {limits: {amd.com/gpu: 500m}}}",
        "GPUs come whole|devices come whole",
        ".resources",
    ),
    _below(LANGUAGE_MODEL + "    parameters: {pretrained: model}\n", 2, "spec.")(
        "harness-and-command",
        "evaluators: {command: [python, evaluate.py], metric: accuracy, harness: {tasks: [arc_easy]}}",
        "harness belongs to causal-lm with pretrained",
        ".harness",
    ),
    _below(OWN_TASK + "    loop: {strategy: hogwild}\n", 2, "spec.")(
        "hogwild-on-gpus",
        "workers: {processesPerReplica: 2, resources: {limits: {nvidia.com/gpu: 2}}}",
        "hogwild trains on processors",
        ".resources",
    ),
    _below(CONFIG + "      strategy: hogwild\n", 2, "spec.")(
        "hogwild-over-workers", "workers: {replicas: 2}", "hogwild is for the processes of one worker", ".replicas"
    ),
    _config("image-size-of-real-data", "data: {imageSize: 32}", "only for the synthetic data set", ".imageSize"),
    _spec(
        "impatient-heartbeat",
        "elasticity: {heartbeatSeconds: 2, lostAfterSeconds: 3}",
        "at least twice heartbeatSeconds",
        ".lostAfterSeconds",
    ),
    _spec(
        "mirror-of-survivors",
        "elasticity: {mirror: true, onMembershipChange: Regroup}",
        "mirror is for ranks that restart",
        ".mirror",
    ),
    _spec("list-for-a-group", "workers: [1]", "group|object"),
    _spec(
        "min-above-replicas",
        "workers: {replicas: 2, minReplicas: 3}",
        "minReplicas must not be greater than replicas",
        ".minReplicas",
    ),
    _spec("misspelt-resources", "workers: {resources: {limit: {cpu: 1}}}", "unknown field", ".resources.limit"),
    _own_trainer(
        "model-compiled", "loop: {strategy: model, compile: true}", "compile is for a model on one device", ".compile"
    ),
    _config("momentum-of-one", "optimizer: {momentum: 1}", "less than 1", ".momentum"),
    _spec("name-of-no-claim", "checkpoint: {storage: {claimName: a b/c}}", "a b/c", ".storage.claimName"),
    _spec(
        "name-of-no-priority-class", "runPolicy: {priorityClassName: very urgent}", "very urgent", ".priorityClassName"
    ),
    _spec("name-of-no-queue", "runPolicy: {queueName: GPU_queue}", "GPU_queue", ".queueName"),
    _case(
        "name-with-capitals",
        TASK.replace("name: bad", "name: Digits"),
        "lower-case|lowercase|should match",
        "metadata.name",
    ),
    _trainer("nameless-variable", "env: [{value: a}]", "missing|Required", "[0].name"),
    _spec("no-reaction", "elasticity: {onCorruption: Ignore}", "Continue", ".onCorruption"),
    _spec("no-heartbeat", "elasticity: {heartbeatSeconds: 0}", "a number from 0.1 to 60", ".heartbeatSeconds"),
    _case("no-spec", NAMED, "missing|Required", "spec"),
    _named("no-trainer", "spec: {workers: {replicas: 2}}", "missing|Required", ".trainer"),
    _spec("no-workers", "workers: {replicas: 0}", "1", ".replicas"),
    _named("nothing-to-train", "spec: {trainer: {image: trainer:1}}", "exactly one of task", ".trainer.task"),
    _trainer("number-for-text", "env: [{name: LEVEL, value: 3}]", "text|string", "[0].value"),
    _config("options-of-another-strategy", "fsdp: {prefetch: 2}", "choose it with strategy: fsdp"),
    _on("processesPerReplica: 2")(
        "pipeline-and-tensor-over-workers",
        "loop: {strategy: pipeline, tensorParallel: 2}",
        "a multiple of the stages of a pipeline, times tensorParallel",
        ".strategy",
    ),
    _on("replicas: 2, processesPerReplica: 2")(
        "pipeline-interleaves-unevenly",
        "loop: {strategy: pipeline, pipeline: {stages: 2, schedule: interleaved1f1b, chunks: 3}}",
        "must be a multiple of stages",
        ".pipeline.chunks",
    ),
    _on("processesPerReplica: 2")(
        "pipeline-offloaded",
        "loop: {strategy: pipeline, fsdp: {cpuOffload: true}}",
        "without cpuOffload and wrapParameters",
        ".fsdp",
    ),
    _on("replicas: 2, processesPerReplica: 2")(
        "pipeline-options-alone",
        "loop: {pipeline: {stages: 2}}",
        "pipeline has options of the strategy pipeline",
        ".pipeline",
    ),
    _on("replicas: 3")(
        "pipeline-over-workers",
        "loop: {strategy: pipeline, pipeline: {stages: 2}}",
        "must be a multiple of the stages of a pipeline",
        ".strategy",
    ),
    _on("replicas: 4")(
        "pipeline-split-within-workers",
        "loop: {strategy: pipeline, fsdp: {shardWithin: Worker}}",
        "with shardWithin: Worker each pipeline stays within a worker",
        ".fsdp",
    ),
    _on("replicas: 2, processesPerReplica: 2")(
        "pipeline-with-batch-norm-over-ranks",
        "loop: {strategy: pipeline, syncBatchNorm: true}",
        "does not go together with syncBatchNorm",
        ".strategy",
    ),
    _on("replicas: 2, processesPerReplica: 4")(
        "pipeline-with-few-chunks",
        "loop: {strategy: pipeline, pipeline: {stages: 4, chunks: 3}}",
        "at least as many as stages",
        ".pipeline.chunks",
    ),
    _beside_command(
        "ports-the-wrong-way-round",
        "workers: {storePorts: {first: 3000, last: 2000}}",
        "first must not be greater",
        ".storePorts.last",
    ),
    _spec(
        "prompts-for-images",
        "evaluators: {generate: {prompts: [What this is]}}",
        "generate belongs to causal-lm",
        ".generate",
    ),
    _language(
        "prompts-twice",
        "evaluators: {generate: {prompts: [What this is], promptsFile: prompts.txt}}",
        "give either prompts or promptsFile",
        ".generate.prompts",
    ),
    _config("quoted-number", 'epochs: "5"', "whole number|integer"),
    _spec(
        "replicas-above-max",
        "workers: {replicas: 3, maxReplicas: 2}",
        "replicas must not be greater than maxReplicas",
        ".maxReplicas",
    ),
    _config(
        "samples-of-real-data", "data: {name: digits, samples: 100}", "only for the synthetic data set", ".samples"
    ),
    _spec(
        "single-value-for-a-list",
        "checkpoint: {storage: {accessModes: ReadWriteMany}}",
        "list|array",
        ".storage.accessModes",
    ),
    _spec("size-without-a-unit-we-know", "checkpoint: {storage: {size: 10 GB}}", "size|pattern|Size", ".storage.size"),
    _config("slice-past-digits", "data: {name: digits, end: 1797}", "digits has 1,442 training samples", ".end"),
    _config(
        "slice-past-synthetic",
        "data: {name: synthetic, samples: 100, start: 100}",
        "start must be less than samples",
        ".end",
    ),
    _spec("snake-case", "workers: {min_replicas: 1}", "unknown field", ".min_replicas"),
    _beside_command(
        "stop-when-nobody-evaluates",
        "runPolicy: {stopWhen: {noBetterFor: 3}}",
        "stopWhen needs evaluators",
        ".stopWhen",
    ),
    _spec(
        "stop-when-nothing",
        "runPolicy: {stopWhen: {minImprovement: 0.1}}",
        "stopWhen needs reaches or noBetterFor",
        ".stopWhen.reaches",
    ),
    _case("task-and-command", TASK + "    command: [python, train.py]\n", "exactly one of task", "spec.trainer.task"),
    _on("processesPerReplica: 2")(
        "tensor-parallel-alone", "loop: {tensorParallel: 2}", "needs strategy: fsdp", ".tensorParallel"
    ),
    _on("replicas: 2, processesPerReplica: 3")(
        "tensor-parallel-over-workers",
        "loop: {strategy: fsdp, tensorParallel: 2}",
        "must divide the processes of a worker",
        ".tensorParallel",
    ),
    _config("text-for-a-number", "epochs: five", "whole number|integer"),
    _spec("text-for-a-truth-value", 'runPolicy: {suspend: "true"}', "true or false|boolean", ".suspend"),
    _command(
        "two-sources",
        "env: [{name: A, valueFrom: {secretKeyRef: {name: hub, key: t}, fieldRef: {fieldPath: spec.nodeName}}}]",
        "give exactly one of secretKeyRef",
        "[0].valueFrom.secretKeyRef",
    ),
    _spec(
        "unknown-amount",
        "workers: {resources: {requests: {memory: plenty}}}",
        "amount|match",
        ".resources.requests.memory",
    ),
    _spec("unknown-field", "runPolcy: {suspend: true}", "unknown field"),
    _config("unknown-model", "model: resnet18", "resnet-18"),
    _spec(
        "unshared-and-fresh",
        "checkpoint: {onExisting: Fresh, storage: {bucket: s3://bucket/runs/bad, shared: false}}",
        "Fresh would delete the earlier run in the bucket; choose another prefix",
        ".onExisting",
    ),
    _below(COMMAND + UNSHARED, 2, "spec.")(
        "unshared-and-watched",
        "evaluators: {command: [python, evaluate.py], watch: checkpoint-*, metric: loss}",
        "save through a session",
        ".watch",
    ),
    _case(
        "unshared-folder-of-a-script",
        COMMAND + "    args: [--out, $TANDEM_RUN_DIR/out]\n" + UNSHARED,
        "are lost with their pod",
        "spec.trainer.args",
    ),
    _spec(
        "unshared-with-a-claim",
        "checkpoint: {storage: {bucket: s3://bucket/runs/bad, shared: false, claimName: shared}}",
        "has no volume: omit claimName",
        ".storage.shared",
    ),
    _case(
        "unshared-with-code",
        TASK + f"    code: sha256:{'0' * 64}\n" + UNSHARED,
        "build it into the image",
        "spec.trainer.code",
    ),
    _spec(
        "unshared-without-a-bucket",
        "checkpoint: {storage: {shared: false}}",
        "a job without a shared directory needs a bucket",
        ".storage.shared",
    ),
    _command(
        "value-twice",
        "env: [{name: TOKEN, value: x, valueFrom: {secretKeyRef: {name: hub, key: token}}}]",
        "give value or valueFrom",
        "[0].valueFrom",
    ),
    _on("processesPerReplica: 2")(
        "zero-bubble-split",
        "loop: {strategy: pipeline, pipeline: {schedule: zeroBubble}, fsdp: {}}",
        "fsdp does not go together with the schedule zeroBubble",
        ".fsdp",
    ),
    _named(
        "zero-character",
        'spec: {trainer: {command: [python, "train\\u0000.py"]}}',
        "without zero characters|should match",
        ".trainer.command[1]",
    ),
    _config("zero-learning-rate", "optimizer: {learningRate: 0}", "greater than 0", ".learningRate"),
)
"""Manifests that the API server refuses, too: in its message are the field and these words."""
CASES: tuple[BadManifest, ...] = (
    *REFUSED,
    # No manifest at all
    _case("empty", "", "empty: there is no manifest"),
    _case("comment-alone", "   \n# nothing\n", "empty: there is no manifest"),
    _case("empty-documents", "---\n---\n", "empty: there is no manifest"),
    _case("a-word", "hello\n", "not a single value"),
    _case("a-list", "- a\n- b\n", "not a list"),
    _case("a-pod", "apiVersion: v1\nkind: Pod\n", "this is a Pod, not a DistributedTrainingJob", "kind"),
    _case("a-pytorchjob", "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n", "this is a PyTorchJob", "kind"),
    _case("two-documents", TASK + "---\n" + TASK, "a second document begins here"),
    _case("not-utf-8", b"name: \xff\xfe\n", "not UTF-8 text: byte 0xff"),
    _case("utf-16", TASK.encode("utf-16"), "not UTF-8"),
    _case("an-archive", b"\x1f\x8b\x08\x00" + bytes(200), "not UTF-8"),
    _case("control-character", TASK + "  workers: \x07\n", "U\\+0007 is not allowed in YAML"),
    _case("html", "<!DOCTYPE html>\n<html>\n", "not a single value"),
    _case("json-cut-short", '{"apiVersion": "tandem.dev/v1alpha1",', "a group whose } is missing|brackets"),
    # No YAML
    _case("bracket", "[", "brackets of which the last is missing"),
    _case("no-colon-after-a-mark", "a: 1\n---b", "a name without a colon"),
    _case("no-block", "a: |x\n", "not YAML"),
    _case("tab", "spec:\n\tworkers: 1\n", "a tab; YAML is indented with spaces"),
    _case("second-colon", NAMED + "spec: trainer: {}\n", "a second colon in one line"),
    _case("colon-in-a-value", TASK + "    image: a: b\n", "a second colon in one line"),
    _case("quote-not-closed", TASK + "  checkpoint:\n    everySteps: '5\n", "a quote that is never closed"),
    _case("double-quote-not-closed", TASK + '    image: "a\n', "a quote that is never closed"),
    _case(
        "list-not-closed", NAMED + "spec:\n  trainer:\n    command: [python, a.py\n    args: [x]\n", "\\] is missing"
    ),
    _case("group-not-closed", TASK + "  workers: {replicas: 2\n", "a group whose } is missing"),
    _case("closed-by-another", NAMED + "spec:\n  trainer: {command: [a}\n", "a list whose \\] is missing"),
    _case("words-after-a-quote", TASK + "    image: 'a' b\n", "more text after a complete value"),
    _case("less-indented", "spec:\n    trainer: {}\n  workers: {}\n", "indented differently"),
    _case("more-indented", "metadata:\n  name: bad\n    labels: {}\n", "a field cannot begin here"),
    _case("no-colon", NAMED + "spec\n  trainer: {}\n", "a field cannot begin here|without a colon"),
    _case("at-sign", TASK + "    image: @team/image\n", "cannot begin with @"),
    _case("percent", TASK + "    image: %a\n", "cannot begin with %"),
    _case("backtick", TASK + "    image: `a`\n", "cannot begin with `"),
    _case("unknown-alias", TASK + "  workers: *group\n", "\\*group refers to the anchor &group.*not defined above"),
    _case("glob", NAMED + "spec:\n  trainer:\n    command: [ls, *.py]\n", "put a text into quotes|not YAML"),
    _case("list-after-a-name", TASK + "  checkpoint: - a\n", "a list cannot begin here"),
    _case("unknown-escape", TASK + '    image: "C:\\data"\n', "begins an escape"),
    _spec("alias-of-itself", "workers: &a [*a]", "an alias that contains itself", "[0]"),
    _spec("merge-of-a-number", "workers:\n    <<: 3", "<< takes a group of fields"),
    _trainer("tag", "image: !x a", "the tag !x is not supported"),
    _case("number-for-a-name", "1: a\n", "a name must be text"),
    _case("list-for-a-name", "? [a]\n: b\n", "a name must be text"),
    _case("field-twice-in-a-group", "a: {b: 1, b: 2}\n", "a.b appears twice", "a.b"),
    _case("tag-of-python", "a: !!python/object/apply:os.system [ls]\nb: !x 1\n", "tag !x", "b"),
    _case("number-of-64-bits", "a: 9223372036854775808\n", "does not fit into 64 bits", "a"),
    _case("field-twice", TASK + "spec: {}\n", "spec appears twice, first in line 5", "spec"),
    _config("infinity", "gradientClipNorm: .inf", "not a number that JSON"),
    _config("not-a-number", "gradientClipNorm: .nan", "not a number"),
    _config("too-large-a-float", "emaDecay: 1e999", "floating point"),
    _spec("too-large-a-number", f"workers:\n    replicas: {'9' * 30}", "64 bits", ".replicas"),
    _spec("number-of-5000-digits", f"workers:\n    replicas: {'9' * 5000}", "64 bits", ".replicas"),
    # Without end
    _case("brackets", _deep("["), "nested too deeply: more than 100 levels"),
    _case("braces", _deep("{"), "nested too deeply: more than 100 levels"),
    _case("dashes", "- " * 20_000, "nested too deeply: more than 100 levels"),
    _case("questions", "? " * 20_000, "nested too deeply"),
    _case("closed-brackets", TASK + "  workers: " + "[" * 200 + "]" * 200, "nested too deeply"),
    _case("a-long-list", NAMED + "x: [" + "1, " * 100_000 + "]\n", "more than 20,000 names and values"),
    _case("many-names", NAMED + "".join(f"k{number}: 1\n" for number in range(40_000)), "more than 20,000 names"),
    _case("many-documents", "---\n" * 100_000, "more than 20,000 names|empty"),
    _case(
        "billion-laughs",
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
        "aliases are expanded",
    ),
    _case("too-large", "#" * (2**19 + 1), "larger than a manifest can be"),
    _case("a-large-comment-and-nothing", ("# " + "x" * 100 + "\n") * 5_000, "empty"),
    _case("a-long-word", TASK + "    image: " + "a" * 100_000 + "\n", "at most 1024 characters", "spec.trainer.image"),
    # Names
    _case(
        "namespace",
        NAMED.replace("name: bad", 'name: bad\n  namespace: "a b/../c"') + "spec: {trainer: {command: [a]}}\n",
        "lower-case",
        "metadata.namespace",
    ),
    _head(
        "name-too-long", f"metadata: {{name: {'a' * 64}}}\nspec: {{trainer: {{command: [a]}}}}", "at most 63", ".name"
    ),
    _head("name-with-a-dot", "metadata: {name: a.b}\nspec: {trainer: {command: [a]}}", "lower-case", ".name"),
    _head("name-missing", "metadata: {}\nspec: {trainer: {command: [a]}}", "metadata.name is missing", ".name"),
    _case("no-metadata", HEAD + "spec: {trainer: {command: [a]}}\n", "metadata is missing", "metadata"),
    _case("other-version", TASK.replace("v1alpha1", "v2"), "must be tandem.dev/v1alpha1", "apiVersion"),
    _case("misspelt-kind", TASK.replace("TrainingJob", "TraningJob"), "must be DistributedTrainingJob", "kind"),
    _spec("queue-too-long", f"runPolicy:\n    queueName: {'q' * 64}", "at most 63", ".queueName"),
    _spec("claim-is-a-path", "checkpoint: {storage: {claimName: ../x}}", "lower-case", ".storage.claimName"),
    _spec("claim-is-empty", "checkpoint: {storage: {claimName: ''}}", "not empty text", ".storage.claimName"),
    _spec(
        "class-with-a-space",
        "checkpoint: {storage: {storageClassName: a b}}",
        "lower-case",
        ".storage.storageClassName",
    ),
    _command(
        "secret-with-capitals",
        "env: [{name: A, valueFrom: {secretKeyRef: {name: Hub, key: t}}}]",
        "lower-case",
        "[0].valueFrom.secretKeyRef.name",
    ),
    _command(
        "key-with-a-slash",
        "env: [{name: A, valueFrom: {secretKeyRef: {name: hub, key: a/b}}}]",
        "letters, digits",
        "[0].valueFrom.secretKeyRef.key",
    ),
    _trainer("image-with-a-space", "image: a b", "without spaces"),
    # Fields
    _named("spec-empty", "spec: {}", "spec.trainer is missing", ".trainer"),
    _named("spec-is-text", "spec: train", "must be a group of fields"),
    _named("command-line", "spec: {trainer: {command: python train.py}}", "a list of words", ".trainer.command"),
    _command("args-as-text", "args: --lr 3", "a list of words"),
    _command("number-among-words", "args: [--lr, 3]", "must be text", "[1]"),
    _command("env-as-a-group", "env: {A: b}", "a list of groups of fields"),
    _config("zero-in-a-path", 'data: {path: "a\\0b"}', "without zero characters", ".path"),
    _config("zero-in-weights", 'initialWeights: "a\\0b"', "without zero"),
    _config("zero-epochs", "epochs: 0", "1 or more, not 0"),
    _config("half-an-epoch", "epochs: 0.5", "a whole number"),
    _config("epochs-in-quotes", "epochs: '5'", "a whole number"),
    _config("negative-rate", "optimizer: {learningRate: -1}", "greater than 0", ".learningRate"),
    _config("rate-as-text", "optimizer: {learningRate: fast}", "a number", ".learningRate"),
    _config(
        "rate-of-another-optimizer",
        "optimizer: {name: adamw, adamwLearningRate: 0.1}",
        "only for muon",
        ".adamwLearningRate",
    ),
    _config("unknown-optimizer", "optimizer: {name: adm}", "one of adam", ".name"),
    _config("unknown-precision", "precision: fp16", "one of float32"),
    _config("unknown-data", "data: {name: cifar}", "one of digits", ".name"),
    _config("slice-the-wrong-way-round", "data: {start: 9, end: 5}", "end must be greater", ".end"),
    _config("slice-after-digits", "data: {name: digits, start: 1442}", "1,442 training samples", ".end"),
    _config("slice-of-synthetic", "data: {name: synthetic, end: 9000}", "samples", ".end"),
    _case(
        "batch-larger-than-the-slice",
        CONFIG + "      dropLast: true\n      data: {end: 50}\n",
        "drop all",
        "spec.trainer.config.globalBatchSize",
    ),
    _config("decay-of-one", "emaDecay: 1", "less than 1"),
    _config("negative-seed", "seed: -1", "from 0 to"),
    _config("yes-for-a-number", "seed: yes", "from 0 to"),
    _spec("no-replicas", "workers: {replicas: 0}", "from 1 to 10000", ".replicas"),
    _spec("too-many-replicas", "workers: {replicas: 10001}", "from 1 to 10000", ".replicas"),
    _spec("too-many-processes", "workers: {processesPerReplica: 65}", "from 1 to 64", ".processesPerReplica"),
    _spec(
        "gpus-of-another-kind",
        "workers: {resources: {limits: {amd.com/gpu: 1.5}}}",
        "devices come whole",
        ".resources.limits.amd.com/gpu",
    ),
    _spec(
        "memory-in-words",
        "workers: {resources: {limits: {memory: much}}}",
        "an amount such as",
        ".resources.limits.memory",
    ),
    _spec("port-too-low", "workers: {storePorts: {first: 80, last: 2000}}", "1024 to 65535", ".storePorts"),
    _spec(
        "tracking-with-a-password",
        'tracking: {mlflow: {uri: "https://me:secret@mlflow.example"}}',
        "MLFLOW_TRACKING_PASSWORD",
        ".mlflow.uri",
    ),
    _spec(
        "tracking-without-a-scheme",
        "tracking: {mlflow: {uri: mlflow.example}}",
        "Tracking server or store",
        ".mlflow.uri",
    ),
    _spec(
        "tracking-with-a-variable-of-python",
        "tracking: {mlflow: {env: [{name: PYTHONPATH, value: /tmp}]}}",
        "variables of tracking begin with",
        ".mlflow.env",
    ),
    _spec("snake-case-policy", "run_policy: {suspend: true}", "unknown field run_policy"),
    _spec("backoff-limit", "backoffLimit: 3", "unknown field backoffLimit"),
    _config("learning-rate-elsewhere", "lr: 0.1", "unknown field lr"),
    _trainer("epochs-elsewhere", "epochs: 3", "unknown field epochs"),
    _spec(
        "metric-of-a-program-without-a-goal",
        "evaluators: {command: [python, score.py], metric: bleu}",
        "goal must say whether",
        ".metric",
    ),
    _spec("watch-alone", "evaluators: {watch: '*.pt'}", "needs a command", ".watch"),
    _spec("watch-elsewhere", "evaluators: {command: [python, score.py], watch: ../*.pt}", "", ".watch"),
    _spec("timeout-of-a-task", "evaluators: {timeoutSeconds: 60}", "belongs to a command", ".timeoutSeconds"),
    _spec(
        "precision-of-a-program",
        "evaluators: {command: [python, score.py], precision: bfloat16}",
        "a command chooses its own",
        ".precision",
    ),
    _spec("args-of-no-program", "evaluators: {args: [x]}", "args belong to a command", ".args"),
    _own_task("metric-of-a-task-without-a-goal", "evaluators: {metric: bleu}", "goal must say", ".metric"),
    _own_trainer("config-of-an-own-task", "config: {}", "all tasks take loop and parameters"),
    _case("config-beside-loop", CONFIG.rstrip() + " {}\n    loop: {}\n", "give only these", "spec.trainer.config"),
    _trainer("loop-with-a-split-of-images", "loop: {strategy: fsdp, tensorParallel: 2}", "matrices are split", ""),
    _command("loop-of-a-command", "loop: {epochs: 2}", "loop belongs to a task"),
    _command("parameters-of-a-command", "parameters: {a: 1}", "parameters belong to a task"),
    _case("config-of-causal-lm", LANGUAGE_MODEL + "    config: {}\n", "all tasks take loop", "spec.trainer.config"),
    _language("metric-of-another-task", "evaluators: {metric: macroF1}", "one of loss, bitsPerByte", ".metric"),
    _spec("bits-of-images", "evaluators: {metric: bitsPerByte}", "one of loss", ".metric"),
    _own_trainer("parameters-as-text", "parameters: width", "a group"),
    _named("task-as-a-path", "spec:\n  trainer:\n    task: a/b.py:C", "module and class", ".trainer.task"),
    _spec("metric-unknown", "evaluators: {metric: f1}", "one of loss", ".metric"),
    _spec("never-a-checkpoint", "checkpoint: {everySteps: 0}", "1 or more", ".everySteps"),
    _spec("keep-none", "checkpoint: {keepLast: 0}", "1 or more", ".keepLast"),
    _spec("negative-seconds", "checkpoint: {everySeconds: -1}", "greater than 0", ".everySeconds"),
    _spec("template-as-text", "workers: {template: pod}", "a group", ".template"),
    _spec("template-of-a-list", "workers: {template: {spec: []}}", "must be a group of fields", ".template"),
    _spec(
        "label-of-ours",
        "workers: {template: {metadata: {labels: {tandem.dev/job: x}}}}",
        "must not set tandem.dev/job",
        ".template",
    ),
)
