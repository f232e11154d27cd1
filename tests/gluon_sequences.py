"""Models of sequences and vectors as Gluon users write them: for ONE sample, with ordinary Python control flow."""

from gluon_models import CLASSES, EMBED, HIDDEN, VOCAB, Case

from cavs_core.mxnet_compat import autograd, gluon, mx

nn, rnn = gluon.nn, gluon.rnn
CHARS = 12


def run_cell(cell, inputs):
    """All outputs of a cell over a list of inputs."""
    x, outputs = inputs[0], []
    states = cell.begin_state(batch_size=1, func=mx.nd.zeros, ctx=x.context, dtype=x.dtype)
    for x in inputs:
        out, states = cell(x, states)
        outputs.append(out)
    return outputs


# ---- tagger ----------------------------------------------------------------------------------


class Tagger(gluon.Block):
    """Characters of a word -> LSTM; with the word's embedding -> forward and backward LSTM -> scores of every word."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.chars = nn.Embedding(CHARS, EMBED)
            self.words = nn.Embedding(VOCAB, EMBED)
            self.spell = rnn.LSTMCell(HIDDEN)
            self.forth = rnn.LSTMCell(HIDDEN)
            self.back = rnn.LSTMCell(HIDDEN)
            self.score = nn.Dense(CLASSES)

    def forward(self, words, spellings):
        inputs = []
        for word, spelling in zip(words, spellings):
            letters = self.chars(mx.nd.array(spelling))                     # (letters, embed)
            spelled = run_cell(self.spell, [letters[i:i + 1] for i in range(len(spelling))])[-1]
            inputs.append(mx.nd.concat(self.words(mx.nd.array([word])), spelled, dim=1))
        forth = run_cell(self.forth, inputs)
        back = run_cell(self.back, inputs[::-1])[::-1]
        return [self.score(mx.nd.concat(f, b, dim=-1)) for f, b in zip(forth, back)]


def hybrid_tagger():
    net = Tagger()
    net.hybridize()             # the net is no HybridBlock; its cells, embeddings and layers are
    return net


def tagged_sentences(rng, dtype):
    samples = []
    for n in (1, 3, 4):
        spellings = [rng.randint(0, CHARS, rng.randint(1, 4)).tolist() for _ in range(n)]
        samples.append((rng.randint(0, VOCAB, n).tolist(), spellings, rng.randint(0, CLASSES, n).tolist()))
    return samples


def tagger_loss(net, words, spellings, tags):
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    scores = net(words, spellings)
    return scores, sum(cross_entropy(score, mx.nd.array([tag])) for score, tag in zip(scores, tags))


# ---- sequence to sequence --------------------------------------------------------------------


class Translator(gluon.Block):
    """GRU over the source; LSTM over the target, which looks at all source states at every step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.source = nn.Embedding(VOCAB, EMBED)
            self.target = nn.Embedding(VOCAB, EMBED)
            self.encoder = rnn.GRUCell(HIDDEN)
            self.decoder = rnn.LSTMCell(HIDDEN)
            self.mix = nn.Dense(HIDDEN, activation="tanh", flatten=False)
            self.score = nn.Dense(VOCAB)

    def forward(self, source, target):
        F = mx.nd
        embedded = self.source(source)                                      # (source words, embed)
        states = run_cell(self.encoder, [F.expand_dims(x, axis=0) for x in embedded])
        memory = F.stack(*states, axis=1)                                   # (1, source words, hidden)
        state = [states[-1], F.zeros_like(states[-1])]
        scores = []
        words = self.target(target)                                         # (target words, embed)
        for t in range(words.shape[0]):
            h, state = self.decoder(F.slice_axis(words, axis=0, begin=t, end=t + 1), state)
            look = F.softmax(F.batch_dot(h.expand_dims(1), memory, transpose_b=True), axis=-1)      # (1, 1, words)
            seen = F.batch_dot(look, memory).reshape((1, -1))
            scores.append(self.score(self.mix(F.concat(h, seen, dim=1))))
        return scores


def sentence_pairs(rng, dtype):
    def words(n):
        return rng.randint(0, VOCAB, n)

    lengths = ((1, 2), (3, 1), (4, 3), (3, 3))
    return [(mx.nd.array(words(n)), mx.nd.array(words(m)), words(m).tolist()) for n, m in lengths]


def translator_loss(net, source, target, words):
    scores = net(source, target)
    losses = [-mx.nd.pick(mx.nd.log_softmax(s), mx.nd.array([w])) for s, w in zip(scores, words)]
    return scores, mx.nd.concat(*losses, dim=0).mean()


# ---- plain vectors ---------------------------------------------------------------------------


class VectorNet(gluon.Block):
    """A recurrent net on vectors without a batch axis, with arrays made on the way."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.w = self.params.get("w", shape=(HIDDEN, HIDDEN))
            self.u = self.params.get("u", shape=(HIDDEN, EMBED))
            self.b = self.params.get("b", shape=(HIDDEN,))
            self.v = self.params.get("v", shape=(HIDDEN,))

    def forward(self, xs):
        nd, dtype = mx.nd, xs[0].dtype
        h = nd.zeros((HIDDEN,), dtype=dtype)
        decay = nd.arange(1, HIDDEN + 1, dtype=dtype) / HIDDEN
        for t, x in enumerate(xs):
            h = nd.tanh(nd.dot(self.w.data(), h) + nd.dot(self.u.data(), x) + self.b.data())
            h = h * nd.full((HIDDEN,), 0.9 - 0.1 * t, dtype=dtype) + nd.ones((HIDDEN,), dtype=dtype) * 0.1
            h = h * decay + nd.ones_like(h) - nd.zeros_like(h) - nd.full((1,), 0.5, dtype=dtype)
            h = h + nd.one_hot(nd.array([t % HIDDEN]), HIDDEN).reshape((-1,)).astype(dtype)
            h = h + nd.dot(nd.eye(HIDDEN, dtype=dtype), h) + nd.linspace(0, 1, HIDDEN, dtype=dtype)
        return nd.dot(self.v.data(), h)


def vector_samples(rng, dtype):
    def vector(size):
        return mx.nd.array(rng.normal(size=size), dtype=dtype)

    return [([vector(EMBED) for _ in range(n)], vector(1)) for n in (1, 2, 4, 2)]


def vector_loss(net, xs, target):
    out = net(xs)
    return [out], (out - target) ** 2


# ---- normalisation and dropout ---------------------------------------------------------------


class NormNet(gluon.Block):
    """A recurrent net with BatchNorm over the words of a sentence, and Dropout."""

    def __init__(self, rate=0.0, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.enter = nn.Dense(HIDDEN)
            self.norm = nn.BatchNorm(momentum=0.7)
            self.drop = nn.Dropout(rate)
            self.layer = nn.LayerNorm()
            self.cell = rnn.RNNCell(HIDDEN)
            self.out = nn.Dense(1)

    def forward(self, words):
        x = self.drop(self.norm(self.enter(words)))                         # (words, hidden)
        states = run_cell(self.cell, [self.layer(x[i:i + 1]) for i in range(words.shape[0])])
        return self.out(states[-1])


def hybrid_norm_net():
    net = NormNet()
    net.hybridize()
    return net


def norm_samples(rng, dtype):
    return [(mx.nd.array(rng.normal(size=(n, EMBED)), dtype=dtype), mx.nd.array([[rng.normal()]], dtype=dtype))
            for n in (2, 4, 3, 4)]


def norm_loss(net, words, target):
    out = net(words)
    return [out], gluon.loss.L1Loss()(out, target)


def norm_loss_predicting(net, words, target):
    """Train with the statistics that were collected before: fine tuning."""
    with autograd.predict_mode():
        return norm_loss(net, words, target)


# ---- fused layers ----------------------------------------------------------------------------


class FusedNet(gluon.Block):
    """gluon.rnn's fused layers over one sentence."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embed = nn.Embedding(VOCAB, EMBED)
            self.lstm = rnn.LSTM(HIDDEN, bidirectional=True)
            self.gru = rnn.GRU(HIDDEN, layout="NTC")
            self.out = nn.Dense(CLASSES)

    def forward(self, words):
        x = self.lstm(mx.nd.expand_dims(self.embed(words), axis=1))         # (words, 1, 2 hidden)
        begin = self.gru.begin_state(1, dtype=x.dtype)
        _, (h,) = self.gru(mx.nd.swapaxes(x, 0, 1), begin)
        return self.out(h[0])


def labelled_sentences(rng, dtype):
    return [(mx.nd.array(rng.randint(0, VOCAB, n)), mx.nd.array([rng.randint(CLASSES)])) for n in (2, 5, 3, 5)]


def label_loss(net, words, label):
    out = net(words)
    return [out], gluon.loss.SoftmaxCELoss()(out, label)


MODELS = {
    "tagger": Case(Tagger, tagged_sentences, tagger_loss),
    "tagger, hybridized": Case(hybrid_tagger, tagged_sentences, tagger_loss),
    "translator with attention": Case(Translator, sentence_pairs, translator_loss),
    "vectors": Case(VectorNet, vector_samples, vector_loss),
    "batch norm": Case(NormNet, norm_samples, norm_loss),
    "batch norm, hybridized": Case(hybrid_norm_net, norm_samples, norm_loss),
    "batch norm, predicting": Case(NormNet, norm_samples, norm_loss_predicting),
    "fused layers": Case(FusedNet, labelled_sentences, label_loss),
}
