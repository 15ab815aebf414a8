package rdma

import "github.com/nixlgo/nixlgo/lease"

// Lives appends the leases among the next limit places of the rank's table and returns where to go on, 0 at the end; see
// lease.Table.Lives. A Step that is under way is waited for.
func (w *Worker) Lives(dst []lease.Life, from, limit int) (lives []lease.Life, next int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return dst, 0
	}
	return w.table.Lives(dst, from, limit)
}
