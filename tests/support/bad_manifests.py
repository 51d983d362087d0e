"""Manifests with one mistake each, and what is to be said of it.

Those that the API server must refuse as well are files in tests/manifests/bad; here are the rest: what is no YAML, what
only a person would type, what nests or repeats without end.
"""

from dataclasses import dataclass

from tests.support import ROOT

FOLDER = ROOT / "tests/manifests/bad"
HEAD = "apiVersion: tandem.dev/v1alpha1\nkind: DistributedTrainingJob\n"
NAMED = HEAD + "metadata:\n  name: bad\n"
LANGUAGE_MODEL = NAMED + "spec:\n  trainer:\n    task: causal-lm\n"
OWN_TASK = NAMED + "spec:\n  trainer:\n    task: a.b:C\n"
TASK = NAMED + "spec:\n  trainer:\n    task: image-classification\n"
CONFIG = TASK + "    config:\n"
COMMAND = NAMED + "spec:\n  trainer:\n    command: [python, train.py]\n"


@dataclass(frozen=True)
class BadManifest:
    """One case."""

    name: str
    text: bytes
    words: str
    """What is said of it, as a regular expression."""
    field: str = ""
    """Which field it is about."""


def _of_file(name: str) -> BadManifest:
    text = (FOLDER / name).read_bytes()
    field, _, words = text.decode().splitlines()[0].removeprefix("# ").partition(": ")
    return BadManifest(name.removesuffix(".yaml"), text, words, field)


def _case(name: str, text: str | bytes, words: str, field: str = "") -> BadManifest:
    return BadManifest(name, text.encode() if isinstance(text, str) else text, words, field)


def _deep(opening: str, count: int = 20_000) -> str:
    return TASK + "  workers: " + opening * count


CASES: tuple[BadManifest, ...] = (
    *(_of_file(path.name) for path in sorted(FOLDER.glob("*.yaml"))),
    # No manifest at all
    _case("empty", "", "empty: there is no manifest"),
    _case("comment-alone", "# nothing\n", "empty: there is no manifest"),
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
    _case("unknown-alias", TASK + "  workers: *group\n", "\\*group refers to the anchor &group"),
    _case("glob", NAMED + "spec:\n  trainer:\n    command: [ls, *.py]\n", "put a text into quotes|not YAML"),
    _case("list-after-a-name", TASK + "  checkpoint: - a\n", "a list cannot begin here"),
    _case("unknown-escape", TASK + '    image: "C:\\data"\n', "begins an escape"),
    _case("alias-of-itself", TASK + "  workers: &a [*a]\n", "an alias that contains itself", "spec.workers[0]"),
    _case("merge-of-a-number", TASK + "  workers:\n    <<: 3\n", "<< takes a group of fields", "spec.workers"),
    _case("tag", TASK + "    image: !x a\n", "the tag !x is not supported", "spec.trainer.image"),
    _case("number-for-a-name", "1: a\n", "a name must be text"),
    _case("list-for-a-name", "? [a]\n: b\n", "a name must be text"),
    _case("field-twice", TASK + "spec: {}\n", "spec appears twice, first in line 5", "spec"),
    _case(
        "infinity",
        CONFIG + "      gradientClipNorm: .inf\n",
        "not a number that JSON",
        "spec.trainer.config.gradientClipNorm",
    ),
    _case(
        "not-a-number",
        CONFIG + "      gradientClipNorm: .nan\n",
        "not a number",
        "spec.trainer.config.gradientClipNorm",
    ),
    _case("too-large-a-float", CONFIG + "      emaDecay: 1e999\n", "floating point", "spec.trainer.config.emaDecay"),
    _case("too-large-a-number", TASK + f"  workers:\n    replicas: {'9' * 30}\n", "64 bits", "spec.workers.replicas"),
    _case(
        "number-of-5000-digits", TASK + f"  workers:\n    replicas: {'9' * 5000}\n", "64 bits", "spec.workers.replicas"
    ),
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
    _case(
        "name-too-long",
        HEAD + f"metadata: {{name: {'a' * 64}}}\nspec: {{trainer: {{command: [a]}}}}\n",
        "at most 63",
        "metadata.name",
    ),
    _case(
        "name-with-a-dot",
        HEAD + "metadata: {name: a.b}\nspec: {trainer: {command: [a]}}\n",
        "lower-case",
        "metadata.name",
    ),
    _case(
        "name-missing",
        HEAD + "metadata: {}\nspec: {trainer: {command: [a]}}\n",
        "metadata.name is missing",
        "metadata.name",
    ),
    _case("no-metadata", HEAD + "spec: {trainer: {command: [a]}}\n", "metadata is missing", "metadata"),
    _case("other-version", TASK.replace("v1alpha1", "v2"), "must be tandem.dev/v1alpha1", "apiVersion"),
    _case("misspelt-kind", TASK.replace("TrainingJob", "TraningJob"), "must be DistributedTrainingJob", "kind"),
    _case(
        "queue-too-long", TASK + f"  runPolicy:\n    queueName: {'q' * 64}\n", "at most 63", "spec.runPolicy.queueName"
    ),
    _case(
        "claim-is-a-path",
        TASK + "  checkpoint: {storage: {claimName: ../x}}\n",
        "lower-case",
        "spec.checkpoint.storage.claimName",
    ),
    _case(
        "claim-is-empty",
        TASK + "  checkpoint: {storage: {claimName: ''}}\n",
        "not empty text",
        "spec.checkpoint.storage.claimName",
    ),
    _case(
        "class-with-a-space",
        TASK + "  checkpoint: {storage: {storageClassName: a b}}\n",
        "lower-case",
        "spec.checkpoint.storage.storageClassName",
    ),
    _case(
        "secret-with-capitals",
        COMMAND + "    env: [{name: A, valueFrom: {secretKeyRef: {name: Hub, key: t}}}]\n",
        "lower-case",
        "spec.trainer.env[0].valueFrom.secretKeyRef.name",
    ),
    _case(
        "key-with-a-slash",
        COMMAND + "    env: [{name: A, valueFrom: {secretKeyRef: {name: hub, key: a/b}}}]\n",
        "letters, digits",
        "spec.trainer.env[0].valueFrom.secretKeyRef.key",
    ),
    _case("image-with-a-space", TASK + "    image: a b\n", "without spaces", "spec.trainer.image"),
    # Fields
    _case("spec-empty", NAMED + "spec: {}\n", "spec.trainer is missing", "spec.trainer"),
    _case("spec-is-text", NAMED + "spec: train\n", "must be a group of fields", "spec"),
    _case(
        "command-line",
        NAMED + "spec: {trainer: {command: python train.py}}\n",
        "a list of words",
        "spec.trainer.command",
    ),
    _case("args-as-text", COMMAND + "    args: --lr 3\n", "a list of words", "spec.trainer.args"),
    _case("number-among-words", COMMAND + "    args: [--lr, 3]\n", "must be text", "spec.trainer.args[1]"),
    _case("env-as-a-group", COMMAND + "    env: {A: b}\n", "a list of groups of fields", "spec.trainer.env"),
    _case(
        "zero-in-a-path",
        CONFIG + '      data: {path: "a\\0b"}\n',
        "without zero characters",
        "spec.trainer.config.data.path",
    ),
    _case(
        "zero-in-weights",
        CONFIG + '      initialWeights: "a\\0b"\n',
        "without zero",
        "spec.trainer.config.initialWeights",
    ),
    _case("zero-epochs", CONFIG + "      epochs: 0\n", "1 or more, not 0", "spec.trainer.config.epochs"),
    _case("half-an-epoch", CONFIG + "      epochs: 0.5\n", "a whole number", "spec.trainer.config.epochs"),
    _case("epochs-in-quotes", CONFIG + "      epochs: '5'\n", "a whole number", "spec.trainer.config.epochs"),
    _case(
        "negative-rate",
        CONFIG + "      optimizer: {learningRate: -1}\n",
        "greater than 0",
        "spec.trainer.config.optimizer.learningRate",
    ),
    _case(
        "rate-as-text",
        CONFIG + "      optimizer: {learningRate: fast}\n",
        "a number",
        "spec.trainer.config.optimizer.learningRate",
    ),
    _case(
        "rate-of-another-optimizer",
        CONFIG + "      optimizer: {name: adamw, adamwLearningRate: 0.1}\n",
        "only for muon",
        "spec.trainer.config.optimizer.adamwLearningRate",
    ),
    _case(
        "unknown-optimizer",
        CONFIG + "      optimizer: {name: adm}\n",
        "one of adam",
        "spec.trainer.config.optimizer.name",
    ),
    _case("unknown-precision", CONFIG + "      precision: fp16\n", "one of float32", "spec.trainer.config.precision"),
    _case("unknown-data", CONFIG + "      data: {name: cifar}\n", "one of digits", "spec.trainer.config.data.name"),
    _case(
        "slice-the-wrong-way-round",
        CONFIG + "      data: {start: 9, end: 5}\n",
        "end must be greater",
        "spec.trainer.config.data.end",
    ),
    _case(
        "slice-after-digits",
        CONFIG + "      data: {name: digits, start: 1442}\n",
        "1,442 training samples",
        "spec.trainer.config.data.end",
    ),
    _case(
        "slice-of-synthetic",
        CONFIG + "      data: {name: synthetic, end: 9000}\n",
        "samples",
        "spec.trainer.config.data.end",
    ),
    _case(
        "batch-larger-than-the-slice",
        CONFIG + "      dropLast: true\n      data: {end: 50}\n",
        "drop all",
        "spec.trainer.config.globalBatchSize",
    ),
    _case("decay-of-one", CONFIG + "      emaDecay: 1\n", "less than 1", "spec.trainer.config.emaDecay"),
    _case("negative-seed", CONFIG + "      seed: -1\n", "from 0 to", "spec.trainer.config.seed"),
    _case("yes-for-a-number", CONFIG + "      seed: yes\n", "from 0 to", "spec.trainer.config.seed"),
    _case("no-replicas", TASK + "  workers: {replicas: 0}\n", "from 1 to 10000", "spec.workers.replicas"),
    _case("too-many-replicas", TASK + "  workers: {replicas: 10001}\n", "from 1 to 10000", "spec.workers.replicas"),
    _case(
        "too-many-processes",
        TASK + "  workers: {processesPerReplica: 65}\n",
        "from 1 to 64",
        "spec.workers.processesPerReplica",
    ),
    _case(
        "gpus-of-another-kind",
        TASK + "  workers: {resources: {limits: {amd.com/gpu: 1.5}}}\n",
        "devices come whole",
        "spec.workers.resources.limits.amd.com/gpu",
    ),
    _case(
        "memory-in-words",
        TASK + "  workers: {resources: {limits: {memory: much}}}\n",
        "an amount such as",
        "spec.workers.resources.limits.memory",
    ),
    _case(
        "port-too-low",
        TASK + "  workers: {storePorts: {first: 80, last: 2000}}\n",
        "1024 to 65535",
        "spec.workers.storePorts",
    ),
    _case(
        "tracking-with-a-password",
        TASK + '  tracking: {mlflow: {uri: "https://me:secret@mlflow.example"}}\n',
        "MLFLOW_TRACKING_PASSWORD",
        "spec.tracking.mlflow.uri",
    ),
    _case(
        "tracking-without-a-scheme",
        TASK + "  tracking: {mlflow: {uri: mlflow.example}}\n",
        "Tracking server or store",
        "spec.tracking.mlflow.uri",
    ),
    _case(
        "tracking-with-a-variable-of-python",
        TASK + "  tracking: {mlflow: {env: [{name: PYTHONPATH, value: /tmp}]}}\n",
        "variables of tracking begin with",
        "spec.tracking.mlflow.env",
    ),
    _case("snake-case-policy", TASK + "  run_policy: {suspend: true}\n", "unknown field run_policy", "spec.run_policy"),
    _case("backoff-limit", TASK + "  backoffLimit: 3\n", "unknown field backoffLimit", "spec.backoffLimit"),
    _case("learning-rate-elsewhere", CONFIG + "      lr: 0.1\n", "unknown field lr", "spec.trainer.config.lr"),
    _case("epochs-elsewhere", TASK + "    epochs: 3\n", "unknown field epochs", "spec.trainer.epochs"),
    _case(
        "metric-of-a-program-without-a-goal",
        TASK + "  evaluators: {command: [python, score.py], metric: bleu}\n",
        "goal must say whether",
        "spec.evaluators.metric",
    ),
    _case("watch-alone", TASK + "  evaluators: {watch: '*.pt'}\n", "needs a command", "spec.evaluators.watch"),
    _case(
        "watch-elsewhere",
        TASK + "  evaluators: {command: [python, score.py], watch: ../*.pt}\n",
        "",
        "spec.evaluators.watch",
    ),
    _case(
        "timeout-of-a-task",
        TASK + "  evaluators: {timeoutSeconds: 60}\n",
        "belongs to a command",
        "spec.evaluators.timeoutSeconds",
    ),
    _case(
        "args-of-no-program",
        TASK + "  evaluators: {args: [x]}\n",
        "args belong to a command",
        "spec.evaluators.args",
    ),
    _case(
        "metric-of-a-task-without-a-goal",
        OWN_TASK + "  evaluators: {metric: bleu}\n",
        "goal must say",
        "spec.evaluators.metric",
    ),
    _case("config-of-an-own-task", OWN_TASK + "    config: {}\n", "take loop and parameters", "spec.trainer.config"),
    _case("loop-of-a-built-in-task", TASK + "    loop: {epochs: 2}\n", "task of your own", "spec.trainer.loop"),
    _case(
        "parameters-of-a-built-in-task",
        TASK + "    parameters: {a: 1}\n",
        "task of your own",
        "spec.trainer.parameters",
    ),
    _case("config-of-causal-lm", LANGUAGE_MODEL + "    config: {}\n", "causal-lm and a task of", "spec.trainer.config"),
    _case(
        "metric-of-another-task",
        LANGUAGE_MODEL + "  evaluators: {metric: macroF1}\n",
        "one of loss, bitsPerByte",
        "spec.evaluators.metric",
    ),
    _case("bits-of-images", TASK + "  evaluators: {metric: bitsPerByte}\n", "one of loss", "spec.evaluators.metric"),
    _case("parameters-as-text", OWN_TASK + "    parameters: width\n", "a group", "spec.trainer.parameters"),
    _case("task-as-a-path", NAMED + "spec:\n  trainer:\n    task: a/b.py:C\n", "module and class", "spec.trainer.task"),
    _case("metric-unknown", TASK + "  evaluators: {metric: f1}\n", "one of loss", "spec.evaluators.metric"),
    _case("never-a-checkpoint", TASK + "  checkpoint: {everySteps: 0}\n", "1 or more", "spec.checkpoint.everySteps"),
    _case("keep-none", TASK + "  checkpoint: {keepLast: 0}\n", "1 or more", "spec.checkpoint.keepLast"),
    _case(
        "negative-seconds",
        TASK + "  checkpoint: {everySeconds: -1}\n",
        "greater than 0",
        "spec.checkpoint.everySeconds",
    ),
    _case("template-as-text", TASK + "  workers: {template: pod}\n", "a group", "spec.workers.template"),
    _case(
        "template-of-a-list",
        TASK + "  workers: {template: {spec: []}}\n",
        "must be a group of fields",
        "spec.workers.template",
    ),
    _case(
        "label-of-ours",
        TASK + "  workers: {template: {metadata: {labels: {tandem.dev/job: x}}}}\n",
        "must not set tandem.dev/job",
        "spec.workers.template",
    ),
)
