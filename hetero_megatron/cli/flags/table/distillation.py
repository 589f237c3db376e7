"""Flags about what another model says of the data: a teacher, and scores in a file."""

from hetero_megatron.cli.flags.flag import count, needs, value
from hetero_megatron.spec.distillation import LOSSES

_TEACHER = needs("--teacher-hf", "--teacher-scores")

FLAGS = (
    value(
        "--teacher-hf", str, None, "Hugging Face directory of a teacher with the same vocabulary: it runs forward on "
        "the ranks that the plan has for it (roles: teacher), else on the student's, cut as the student, before each "
        "step, and the student learns its distribution of the next token",
    ),
    value(
        "--teacher-scores", str, None, "the same from a file that hetero-megatron score wrote over the same data: the "
        "teacher's likeliest tokens; --teacher-hf beside it only says whose they are to be",
    ),
    value(
        "--distill-loss", str, "forward_kl", "divergence of teacher and student: forward_kl is KL(teacher, student), "
        "reverse_kl the other way round, js the generalised Jensen-Shannon divergence", choices=LOSSES, needs=_TEACHER,
    ),
    value(
        "--distill-weight", float, 0.5, "of the divergence, times the squared temperature, in the loss; the labels' "
        "cross-entropy has the rest to 1", above=0.0, most=1.0, needs=_TEACHER,
    ),
    value(
        "--distill-temperature", float, 1.0, "by which the logits of both are divided in the divergence; of "
        "hetero-megatron score, of what is stored", above=0.0, most=1e3,
        needs=needs("--teacher-hf", "--teacher-scores", "--save-scores"),
    ),
    value(
        "--distill-js-beta", float, 0.5, "weight of the teacher in js", above=0.0, below=1.0,
        needs=needs("--distill-loss js"),
    ),
    value("--save-scores", str, None, "of hetero-megatron score: the file to write"),
    count(
        "--score-top-k", 64, "likeliest tokens of a position whose log-probabilities hetero-megatron score stores, or "
        "a teacher on ranks of its own sends", most=2**20, needs=needs("--save-scores", "--teacher-hf"),
    ),
)  # fmt: skip
