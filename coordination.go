// Package coordination elects a leader for a role among processes that share
// nothing but a Kafka cluster, and lets that leader write to Kafka in a way that no
// deposed one can.
//
// # What it does not promise
//
// An election does not stop a leader from working on after its end: a process that
// is paused does not know that it is. What stops it is whoever it talks to. Kafka
// does: a write through [Leadership.Produce] under an old token is refused by the
// broker. Other systems do if they check the [Leadership.FencingNumber], and stop
// nothing if they do not. The lease itself guards nothing; it only says when a
// standby may challenge.
//
// # The idea
//
// Kafka's transaction coordinator hands out producer epochs. Whoever calls
// InitProducerId for a transactional id gets the next one, and from then on every
// broker refuses transactional writes that carry an older one. So a role is a
// transactional id, and leading it means to hold its newest epoch. The producer id
// and epoch are the [FencingToken] of a leadership.
//
// What is left is when to ask for an epoch, and who does. That is in a compacted
// topic, [StateTopic], shared by all roles and by the members of other
// implementations. A member that stands by has a [Registration] in it; the one that
// leads has a [Lease], which it renews. The offset of the registration is its rank.
// When the lease ends, the first in rank challenges, a stagger later the second,
// and so on.
//
// So safety comes from the broker's fence, liveness from the lease, and order from
// the log. A lease that is wrong makes a failover early or late, and never two
// writers.
//
// # How to use it
//
// Make one [BrokerTransport] for a process, and an [Elector] for each role.
// [Elector.Run] leads whenever it can and calls a function each time;
// [Elector.Campaign] leads once. Both give a [Leadership], which ends when its
// context does. [DescribeLeadership] asks from the outside who leads.
//
// # Where things are
//
//   - record.go: names, tokens, and the frozen format of the topic
//   - lease.go: how long a lease lasts; clocks
//   - succession.go: the fold of the log, and the rule of succession
//   - candidacy.go: the further rules of a candidate, as pure functions
//   - elector.go, candidate.go, leadership.go: the elector, a campaign, a term
//   - transport.go: the seam between all that and the cluster
//   - committer.go, transact.go, gate.go: guarded writes
//   - broker.go, reader.go, fold.go, term.go, offsets.go, resolve.go, topic.go: the
//     seam over franz-go
//   - options.go, errors.go: what can be set, and what can go wrong
//
// # Time
//
// A leader's lease runs on its own monotonic clock, from before a renewal is sent. A
// standby counts from a record's arrival, on its own monotonic clock, or by the
// clock of the one broker that appended it. Wall clocks are written into records for
// people and for other implementations, and are never compared. On Linux the
// monotonic clock stands still while a machine is suspended: a machine that sleeps
// through its lease finds out at its first write, from the broker, and not from
// [Leadership.Deadline].
package coordination
